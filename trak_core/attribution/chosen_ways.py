"""Keep the way to gradients that was chosen once for a study and its model, for all jobs."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch

from trak_core import __version__
from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.device import device_name
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.errors import InputError
from trak_core.gradients import METHODS, Batch, GradientMethod, choose_method
from trak_core.spec import FeaturesSpec
from trak_core.system.files import CONFIG_RECORD, read_record, write_record

RECORD = "gradient_method.json"

# The name of a way to gradients and its notice, by the form of what is differentiated.
Ways = dict[str, tuple[str, str | None]]


def chosen_way(
    loaded: LoadedModel, few: Batch, ways: Ways, *, reads_terms: bool = False
) -> GradientMethod:
    """Return the way of ``ways``, or choose one by a few samples and add it; print its notice.

    What was not compared in this form is: on another device, say, with blocks that run twice,
    logits in pieces, or a mask. So is what ``reads_terms``, of which plain autograd has none.
    """
    form = _form(loaded, few)
    name, notice = ways.get(form, (None, None))
    method = METHODS.get(name or "")
    if method is None or (reads_terms and name == "gradients_one_by_one"):
        given = loaded.model, loaded.parameters, loaded.output, few
        method, notice = choose_method(*given, reads_terms=reads_terms)
        if not reads_terms:
            ways[form] = method.__name__, notice
    if notice is not None:
        print(f"Notice: {notice}", flush=True)
    return method


def kept_way(
    loaded: LoadedModel,
    few: Batch,
    *,
    artifact: Path,
    spec: FeaturesSpec,
    code: str,
    reads_terms: bool = False,
) -> GradientMethod:
    """Return what ``chosen_way`` returns, by the record of the run that writes ``artifact``.

    The first job of a run that meets a form compares, and keeps its choice in the results folder
    for all others. The record is of no use to another model, or other code. It decides no number
    beyond rounding, so that nothing depends on it; where none can be kept, every job compares.
    """
    folders = (folder for folder in artifact.parents if read_record(folder / CONFIG_RECORD))
    record = next((folder / RECORD for folder in folders), None)
    by_code = {} if record is None else _read(record, spec)
    ways = dict(by_code.get(code, {}))
    method = chosen_way(loaded, few, ways, reads_terms=reads_terms)
    if record is not None and ways != by_code.get(code, {}):
        with suppress(InputError):
            write_record(record, {"model": _model(spec), "ways": by_code | {code: ways}})
    return method


def ways_of_run(results: Path, spec: FeaturesSpec) -> Ways:
    """Return the ways that the jobs of a run have kept for a spec's model."""
    by_code = _read(results / RECORD, spec)
    return {form: way for ways in by_code.values() for form, way in ways.items()}


def _read(record: Path, spec: FeaturesSpec) -> dict[str, Ways]:
    """Return the ways by the code of the jobs that kept them; none of another model."""
    known = read_record(record)
    return known["ways"] if known.get("model") == _model(spec) else {}


def _form(loaded: LoadedModel, few: Batch) -> str:
    """Return all that may decide the way, except the numbers in weights and samples."""
    in_pieces = isinstance(loaded.model, MarginsOfTokens)
    names = {type(part).__module__.partition(".")[0] for part in loaded.model.modules()}
    versions = {n: str(getattr(sys.modules.get(n), "__version__", "")) for n in sorted(names)}
    inputs = [[name, tensor.ndim, str(tensor.dtype)] for name, tensor in few.tensors()]
    return json.dumps({
        **{"torch": torch.__version__, "device": device_name(loaded.device), "inputs": inputs},
        **{"alone": len(few) == 1, "in_pieces": in_pieces, "recomputes": loaded.blocks.is_on},
        "packages": versions,
    })


def _model(spec: FeaturesSpec) -> dict[str, object]:
    described = spec.as_dict()
    keys = ("study_digest", "model_output", "parameter_patterns")
    return {"trak-core": __version__, **{key: described[key] for key in keys}}

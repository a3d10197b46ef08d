"""Keep the way to gradients that was chosen once for a study and its model, for all jobs."""

import json
from pathlib import Path

import torch

from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.device import device_name
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.gradients import METHODS, Batch, GradientMethod, choose_method
from trak_core.spec import FeaturesSpec
from trak_core.system.files import read_record, write_record

# The name of a way to gradients and its notice, by the form of what is differentiated.
Ways = dict[str, tuple[str, str | None]]


def add_way(ways: Ways, loaded: LoadedModel, few: Batch) -> None:
    """Choose the way to gradients of a model by a few samples, one at least."""
    method, notice = choose_method(loaded.model, loaded.parameters, loaded.output, few)
    ways[_form(loaded, few)] = method.__name__, notice


def chosen_way(
    loaded: LoadedModel, few: Batch, ways: Ways, *, reads_terms: bool = False
) -> GradientMethod:
    """Return the way of ``ways``, or choose one by a few samples; print its notice once.

    A job chooses anew what was not compared in its form: on another device, say, with blocks that
    run twice, logits in pieces, or a mask. So does one that ``reads_terms``, of which plain
    autograd has none.
    """
    form = _form(loaded, few)
    name, notice = ways.get(form, (None, None))
    method = METHODS.get(name or "")
    if method is None or (reads_terms and name == "gradients_one_by_one"):
        given = loaded.model, loaded.parameters, loaded.output, few
        method, notice = choose_method(*given, reads_terms=reads_terms)
    if not reads_terms:
        ways[form] = method.__name__, None
    if notice is not None:
        print(f"Notice: {notice}", flush=True)
    return method


def _form(loaded: LoadedModel, few: Batch) -> str:
    """Return all that may decide the way, except the numbers in weights and samples."""
    in_pieces = isinstance(loaded.model, MarginsOfTokens)
    inputs = [[name, tensor.ndim, str(tensor.dtype)] for name, tensor in few.tensors()]
    return json.dumps({
        **{"torch": torch.__version__, "device": device_name(loaded.device), "inputs": inputs},
        **{"alone": len(few) == 1, "in_pieces": in_pieces, "recomputes": loaded.blocks.is_on},
    })


def write_ways(path: Path, spec: FeaturesSpec, ways: Ways) -> None:
    """Write the ways of a model that a spec describes."""
    write_record(path, {"model": _model(spec), "ways": ways})


def read_ways(path: Path | None, spec: FeaturesSpec) -> Ways:
    """Return the ways that were written for a spec's model; none if it has no such file."""
    known = {} if path is None else read_record(path)
    return known["ways"] if known.get("model") == _model(spec) else {}


def _model(spec: FeaturesSpec) -> dict[str, object]:
    described = spec.as_dict()
    return {key: described[key] for key in ("study_digest", "model_output", "parameter_patterns")}

"""Choose the gradient method for a model, and record the choice for the other jobs of a run."""

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
from trak_core.runtime.files import CONFIG_RECORD, read_record, write_record
from trak_core.runtime.progress import print_line
from trak_core.settings import FeaturesSpec

RECORD = "gradient_method.json"

# Maps conditions (see ``method_for``) to the name of the chosen method, and a notice or None.
Methods = dict[str, tuple[str, str | None]]


def method_for(
    loaded: LoadedModel, few: Batch, methods: Methods, *, reads_terms: bool = False
) -> GradientMethod:
    """Return the method by which the gradients of a model's samples are computed.

    The choice depends on conditions such as the dtypes of the samples ``few``. If ``methods``
    contains no choice for these conditions, methods are compared on the first two samples, and the
    choice is added to ``methods``. A notice that belongs to the choice is printed. With
    ``reads_terms``, the method must compute the terms whose sum is a gradient. Plain autograd is
    then excluded, and the choice is not added.
    """
    conditions = _conditions(loaded, few)
    name, notice = methods.get(conditions, (None, None))
    method = METHODS.get(name or "")
    if method is None or (reads_terms and name == "gradients_one_by_one"):
        given = loaded.model, loaded.parameters, loaded.output, few
        method, notice = choose_method(*given, reads_terms=reads_terms)
        if not reads_terms:
            methods[conditions] = method.__name__, notice
    if notice is not None:
        print_line(f"Notice: {notice}")
    return method


def recorded_method_for(
    loaded: LoadedModel,
    few: Batch,
    *,
    artifact: Path,
    spec: FeaturesSpec,
    code: str,
    reads_terms: bool = False,
) -> GradientMethod:
    """Return the gradient method for a model, as chosen by the run that writes ``artifact``.

    For each set of conditions (see ``method_for``), the first job of the run compares methods and
    records its choice in the results folder. A record is ignored if it is damaged, or if it belongs
    to another model or to another version of the code than ``code``. If no record can be written,
    every job compares methods.
    """
    folders = (folder for folder in artifact.parents if read_record(folder / CONFIG_RECORD))
    record = next((folder / RECORD for folder in folders), None)
    by_code = {} if record is None else _read(record, spec)
    methods = dict(by_code.get(code, {}))
    method = method_for(loaded, few, methods, reads_terms=reads_terms)
    if record is not None and methods != by_code.get(code, {}):
        with suppress(InputError):
            write_record(record, {"model": _model(spec), "methods": by_code | {code: methods}})
    return method


def recorded_methods(results: Path, spec: FeaturesSpec) -> Methods:
    """Return the gradient methods that the jobs of a run recorded for the model of ``spec``."""
    by_code = _read(results / RECORD, spec)
    return {key: method for methods in by_code.values() for key, method in methods.items()}


def _read(record: Path, spec: FeaturesSpec) -> dict[str, Methods]:
    """Return the recorded methods for each version of the code, or {} for another model."""
    known = read_record(record)
    return known.get("methods", {}) if known.get("model") == _model(spec) else {}


def _conditions(loaded: LoadedModel, few: Batch) -> str:
    """Return a text with everything that can affect the choice of a method.

    Only the values of weights and samples are left out.
    """
    names = {type(part).__module__.partition(".")[0] for part in loaded.model.modules()}
    return json.dumps({
        "torch": torch.__version__,
        "device": device_name(loaded.device),
        "inputs": [[name, tensor.ndim, str(tensor.dtype)] for name, tensor in few.tensors()],
        "alone": len(few) == 1,
        "in_pieces": isinstance(loaded.model, MarginsOfTokens),
        "recomputes": loaded.blocks.is_on,
        "packages": {
            name: str(getattr(sys.modules.get(name), "__version__", "")) for name in sorted(names)
        },
    })


def _model(spec: FeaturesSpec) -> dict[str, object]:
    described = spec.as_dict()
    keys = ("study_digest", "model_output", "parameter_patterns")
    return {"trak-core": __version__, **{key: described[key] for key in keys}}

"""Read the arguments of an ``Attributor``."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trak_core.attribution.device import PRECISIONS, takes_cuda
from trak_core.config.checkpoint_list import Checkpoint, checkpoint_table, seeming_runs
from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import TABLE, function_location
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.runtime.progress import notice
from trak_core.settings import Combine, Weighting

Weights = str | Path | Mapping[str, Any]
Output = str | ModelOutput | Callable[..., Tensor]


def without_none(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None, by name."""
    return {key: value for key, value in settings.items() if value is not None}


def read_checkpoints(given: Any) -> tuple[dict[str, Checkpoint], dict[str, Any]]:
    """Return the checkpoints by id, sorted, and a path, a state dict or None for each id."""
    if given is None:
        return {"model": Checkpoint("model", path="")}, {"model": None}
    if isinstance(given, str | Path) or _is_state_dict(given):
        given = [given]
    if not isinstance(given, Mapping):
        stems = [_id_of(w) if isinstance(w, str | Path) else "" for w in given]
        are_names = all(stems) and len({*stems}) == len(stems)
        given = {stems[i] if are_names else str(i): weights for i, weights in enumerate(given)}
    entries: dict[str, Any] = {}
    in_memory: dict[str, Any] = {}
    for name, weights in given.items():
        is_entry = isinstance(weights, Mapping) and not _is_state_dict(weights)
        entry = dict(weights) if is_entry else {"path": weights}
        if isinstance(entry.get("path"), Mapping):
            in_memory[str(name)] = entry["path"]
            entry["path"] = ""  # so that no training step is read from the name of a folder
        entries[str(name)] = {k: str(v) if k == "path" else v for k, v in entry.items()}
    table = checkpoint_table(entries, None)
    paths = {name: Path(c.path) for name, c in table.items() if c.path}
    missing = [path for path in paths.values() if not path.exists()]
    if missing:
        raise InputError(
            f"A checkpoint must be an existing file or folder. Found nothing at {missing[0]}.",
            code="attribution.no_checkpoint",
        )
    if told := seeming_runs(table):
        notice(told)
    return table, paths | in_memory


def _id_of(path: str | Path) -> str:
    """Return the id of a file, such as ``epoch_1-step_60`` for ``epoch=1-step=60.ckpt``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", Path(path).stem).lstrip(".-")


def _is_state_dict(given: Any) -> bool:
    is_filled = isinstance(given, Mapping) and bool(given)
    return is_filled and all(isinstance(value, Tensor) for value in given.values())


def name_of_output(output: Output) -> str:
    """Return the name of a model output, which is stored in files."""
    if isinstance(output, str):
        if output not in TABLE and function_location(output) is None:
            raise InputError(
                f"`output` must be one of {', '.join(TABLE)}; `file.py:function`; a function; or a "
                f"ModelOutput. Found {output!r}.",
                code="attribution.output",
            )
        return output
    function = output.value if isinstance(output, ModelOutput) else output
    return str(getattr(function, "__qualname__", type(function).__name__))


def check_scoring(scoring: Mapping[str, Any]) -> None:
    """Raise an error for values that the schema of the config does not allow."""
    power, damping = scoring["loss_weight_power"], scoring["damping"]
    if not 0 < power <= 1 or not 0 <= damping < float("inf"):
        raise InputError(
            "`loss_weight_power` must be above 0 and at most 1, and `damping` at least 0. Found "
            f"{power} and {damping}.",
            code="attribution.scoring",
        )
    for key, values in (("combine", Combine), ("weighting", Weighting), ("precision", PRECISIONS)):
        if scoring[key] not in [*values]:
            raise InputError(
                f"`{key}` must be one of {', '.join(values)}. Found {scoring[key]!r}.",
                code="attribution.scoring",
            )


def device_named(given: str | torch.device, *, projects: bool) -> torch.device:
    """Return a device. See ``takes_cuda`` for ``projects`` and errors."""
    if given == "auto":
        given = "cuda" if takes_cuda("auto") else "cpu"
    device = torch.device(given)
    takes_cuda(device.type, projects=projects)
    return device

"""Choose the checkpoints of one network among files of weights, and read times from their names."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trak_core.errors import InputError, listed
from trak_core.study.load_checkpoint import read_weights
from trak_core.study.match_state_dict import shared_prefixes

ENDING = re.compile(r"\.(?:pt|pth|ckpt|bin|safetensors)(?:\.tar)?$", re.I)
# The patterns of an epoch or a step, and of a measure of quality. "sweep_1" matches no pattern.
_TIME = re.compile(r"(?<![a-z])(epochs?|ep|steps?|iter(?:ation)?s?)[-_=]?(\d+)", re.I)
_QUALITY = re.compile(r"(?<![a-z])(?:loss|acc(?:uracy)?|auc|f1|error)[-_=]?\d*\.?\d+", re.I)
# The shapes of tensors by their names, without the common prefix.
Shapes = Mapping[str, tuple[int, ...]]


def loadable(checkpoints: Iterable[Path], report: list[str]) -> dict[Path, Shapes]:
    """Return the tensor shapes in each checkpoint that can be loaded, without reading its values.

    For each other file, a line with the reason is added to ``report``.
    """
    loaded: dict[Path, Shapes] = {}
    for path in checkpoints:
        try:
            weights = read_weights(path)
        except InputError as error:
            report.append(f"left out: {error}")
            continue
        if weights.notice:
            report.append(f"found: {path}: {weights.notice}")
        prefix = shared_prefixes(weights.state)[-1]
        loaded[path] = {
            key.removeprefix(prefix): tuple(t.shape) for key, t in weights.state.items()
        }
    return loaded


def of_one_network(loaded: Mapping[Path, Shapes], report: list[str]) -> list[Path]:
    """Return the checkpoints of the most frequent network, sorted.

    Checkpoints with the same names and shapes of tensors belong to one network. A line is added to
    ``report`` for each other network.
    """
    networks = _grouped(loaded, lambda path: frozenset(loaded[path].items()))
    first = max(networks, key=len)
    for network in networks:
        if network is not first:
            reason = f"of another network than {first[0]}, which has more files or comes first"
            report.append(f"left out: {listed(network)}: {reason}")
    return sorted(first)


def times_of(checkpoints: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return ``run`` and ``at`` of checkpoints whose names differ only in an epoch or a step.

    A measure of quality can also differ, as in ``epoch=3-val_loss=0.25.ckpt``. A run is named after
    its folder if each run has its own.
    """
    times = {path: _TIME.findall(path.name)[-1] for path in checkpoints if _TIME.search(path.name)}

    def run_of(path: Path) -> tuple[Path, str, str]:
        return path.parent, _QUALITY.sub("", _TIME.sub("", path.name)), times[path][0].lower()

    several = [run for run in _grouped(times, run_of) if len(run) > 1]
    folders = folder_names(run[0].parent for run in several)
    names = [*folders.values()]
    if len(names) < len(several):
        names = [f"run{n}" for n, _ in enumerate(several, 1)]
    named = zip(names, several, strict=True)
    return {p: {"run": name, "at": int(times[p][1])} for name, run in named for p in run}


def folder_names(folders: Iterable[Path]) -> dict[Path, str]:
    """Return a different name for each folder, from a part of its path, or {} without such a part.

    Example:
        >>> [*folder_names([Path("out/a/saved"), Path("out/b/saved")]).values()]
        ['a', 'b']
    """
    paths = [*dict.fromkeys(folders)]
    for level in range(1, 1 + min((len(path.parts) for path in paths), default=0)):
        names = {path: re.sub(r"[^A-Za-z0-9_]+", "_", path.parts[-level]) for path in paths}
        if len({*names.values()}) == len(names):
            return names
    return {}


def _grouped(paths: Iterable[Path], key: Callable[[Path], Any]) -> list[list[Path]]:
    groups: dict[Any, list[Path]] = {}
    for path in paths:
        groups.setdefault(key(path), []).append(path)
    return [*groups.values()]

"""Choose checkpoints among files of weights: what loads, of one network, one state of each run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trak_core.errors import InputError, listed
from trak_core.study.fit_weights import shared_prefixes
from trak_core.study.load_checkpoint import read_state_dict, weights_without_numbers

ENDING = re.compile(r"\.(?:pt|pth|ckpt|bin|safetensors)(?:\.tar)?$", re.I)
# An epoch or a step and its number; "sweep_1" has none. And how good a state was at that time.
_TIME = re.compile(r"(?<![a-z])(epochs?|ep|steps?|iter(?:ation)?s?)[-_=]?(\d+)", re.I)
_QUALITY = re.compile(r"(?<![a-z])(?:loss|acc(?:uracy)?|auc|f1|error)[-_=]?\d*\.?\d+", re.I)
# States of a run without their time, the one to take first, and other words that name no run.
_MARKS = ("last", "latest", "final", "current", "best", "ema", "swa", "init", "initial")
_NO_RUN = {*_MARKS, *("", "checkpoint", "ckpt", "model", "net", "network", "val", "weights")}
# Names of tensors, without what all begin with, and their shapes.
Shapes = Mapping[str, tuple[int, ...]]


def loadable(checkpoints: Iterable[Path], report: list[str]) -> dict[Path, Shapes]:
    """Return the shapes of all checkpoints that load; only old files' numbers are read.

    The report says which don't, and why.
    """
    loaded: dict[Path, Shapes] = {}
    for path in checkpoints:
        try:
            weights = weights_without_numbers(path)
            state = read_state_dict(path)[0] if weights is None else weights.state
        except InputError as error:
            report.append(f"left out: {error}")
            continue
        if weights is not None and weights.notice:
            report.append(f"found: {path}: {weights.notice}")
        prefix = shared_prefixes(state)[-1]
        loaded[path] = {key.removeprefix(prefix): tuple(t.shape) for key, t in state.items()}
    return loaded


def chosen(loaded: Mapping[Path, Shapes], n_outputs: int, report: list[str]) -> list[Path]:
    """Return the checkpoints of one network, and of each run those whose time is known, or one.

    Files with the same names and shapes are of one network. ``n_outputs`` is how many outputs the
    data need. The report says what is left out, and why.
    """

    def merits(network: Sequence[Path]) -> dict[str, int]:
        shapes = loaded[network[0]]
        fits = any(shape[:1] == (n_outputs,) for shape in shapes.values())
        return {
            f"which has a tensor for {n_outputs} outputs": fits,
            "which has tensors called weight": any(name.endswith("weight") for name in shapes),
            "which more files are of": len(network),
            "which has more tensors": len(shapes),
        }

    networks = _grouped(loaded, lambda path: frozenset(loaded[path].items()))
    first = max(networks, key=lambda network: [*merits(network).values()])
    for network in networks:
        if network is not first:
            others = merits(network)
            better = [merit for merit, n in merits(first).items() if n != others[merit]]
            why = [*better, "which comes first"][0]
            report.append(f"left out: {listed(network)}: of another network than {first[0]}, {why}")
    checkpoints: list[Path] = []
    for run in _grouped(first, _run_of):
        known = min(map(_lack, run))
        kept = [path for path in run if _lack(path) == known][: 1 if known > 1 else None]
        checkpoints += kept
        if others := [path for path in run if path not in kept]:
            told = f"by name of one run with {kept[-1]}, at a time that the name doesn't tell"
            report.append(f"left out: {listed(others)}: {told}")
    if times_of(checkpoints):
        report.append("chose: files whose names differ in an epoch or a step as times of one run")
    return sorted(checkpoints)


def times_of(checkpoints: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return ``run`` and ``at`` of checkpoints whose names differ in an epoch or a step alone.

    How good they were may differ too, as in ``epoch=3-val_loss=0.25.ckpt``.
    """
    times = {path: _TIME.findall(path.name)[-1] for path in checkpoints if _TIME.search(path.name)}
    runs = _grouped(times, lambda path: (_run_of(path), times[path][0].lower()))
    several = enumerate((run for run in runs if len(run) > 1), 1)
    return {p: {"run": f"run{n}", "at": int(times[p][1])} for n, run in several for p in run}


def _grouped(paths: Iterable[Path], key: Callable[[Path], Any]) -> list[list[Path]]:
    groups: dict[Any, list[Path]] = {}
    for path in paths:
        groups.setdefault(key(path), []).append(path)
    return [*groups.values()]


def _words(stem: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", stem.lower())


def _run_of(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return what tells the training run of a checkpoint: its folder, and words of its name."""
    words = _words(_QUALITY.sub("", _TIME.sub("", ENDING.sub("", path.name))))
    return path.parent, tuple(word for word in words if word not in _NO_RUN)


def _lack(path: Path) -> int:
    """Return 0 if a name has an epoch or a step, 1 if not, and from 2 on for one of ``_MARKS``."""
    words = _words(ENDING.sub("", path.name))
    marks = [rank for rank, mark in enumerate(_MARKS, 2) if mark in words]
    return max(marks, default=int(_TIME.search(path.name) is None))

"""List a config's checkpoints with their paths, training runs and times in training."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trak_core.config.read_config import read_table
from trak_core.errors import InputError, listed

_ID_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEYS = ("path", "run", "at", "state_dict")
# The names of the folders in which transformers' Trainer saves checkpoints.
_OF_TRAINER = re.compile(r"checkpoint-(\d+)")
# An epoch or a step in a file name, and a measure of quality. The lookbehind prevents matches in
# the middle of a word, such as "ep_1" in "sweep_1".
_TIME = re.compile(r"(?<![a-z])(epochs?|ep|steps?|iter(?:ation)?s?)[-_=]?(\d+)", re.I)
_QUALITY = re.compile(r"(?<![a-z])(?:loss|acc(?:uracy)?|auc|f1|error)[-_=]?\d*\.?\d+", re.I)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint of a run, which is one training of a model."""

    run: str  # the name of the run
    at: float | None = None  # the time in training, in any unit; None if it is not known
    path: str | None = None  # the file or folder; None if the pipeline trains the checkpoint
    arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of this run's `train`
    is_listed: bool = False  # whether it was found in a Trainer's folder that the config names
    state_dict: str | None = None  # the key of the state dict in the file; None for the usual key


def checkpoint_table(
    checkpoints: Mapping[Any, Any] | str, training: Mapping[str, Any] | None
) -> dict[str, Checkpoint]:
    """Return a config's checkpoints by id, sorted by id.

    Args:
        checkpoints: A mapping of ids, or the path of a table with the columns ``checkpoint`` and
            ``path`` and the optional columns ``run``, ``at`` and ``state_dict``.
        training: The config's ``training``, or None. With ``training``, each value in
            ``checkpoints`` contains arguments of ``train``, and ``at`` may be a list of times.
    """
    if isinstance(checkpoints, str):
        rows = read_table(Path(checkpoints), ("checkpoint", "path"), ("run", "at", "state_dict"))
        named = [
            (name, {"path": path, "run": run or None, "at": _number(at, name), "state_dict": part})
            for name, path, run, at, part in rows
        ]
    else:
        named = [(str(name), value) for name, value in checkpoints.items()]
    # The ids of an entry's checkpoints begin with the entry's name, so check the names first.
    _check_ids([name for name, _ in named])
    expand = _saved if training is None else _trained
    pairs = [pair for name, value in named for pair in expand(name, value, training or {})]
    _check_ids([name for name, _ in pairs])
    table = dict(sorted(pairs))
    for run, ids in runs_of(table).items():
        times = [table[name].at for name in ids]
        if len(ids) > 1 and (None in times or len(set(times)) < len(times)):
            shown = ", ".join(f"{name}: {at}" for name, at in zip(ids, times, strict=True))
            raise InputError(
                "All checkpoints of a run must have different times `at`, which determine their "
                f"order. Found {shown} in run {run!r}.",
                code="config.checkpoint_time",
            )
    return table


def runs_of(checkpoints: Mapping[str, Checkpoint]) -> dict[str, list[str]]:
    """Return the checkpoint ids of each training run, sorted by time. Runs are sorted by name."""
    runs: dict[str, list[str]] = {}
    for name in sorted(checkpoints, key=lambda name: (checkpoints[name].at or 0, name)):
        runs.setdefault(checkpoints[name].run, []).append(name)
    return dict(sorted(runs.items()))


def are_from_along_runs(checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Return whether the checkpoints were saved at different times during training."""
    # If the pipeline trains a checkpoint without `at`, the checkpoint is the end of its run.
    times = {c.at for c in checkpoints.values() if c.at is not None or c.path is None}
    return len(runs_of(checkpoints)) < len(checkpoints) or len(times) > 1


def times_of(checkpoints: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return ``run`` and ``at`` for checkpoints whose names differ only in an epoch or a step.

    A loss or accuracy in the names may also differ, as in ``epoch=3-val_loss=0.25.ckpt``.
    """
    times = {path: _TIME.findall(path.name)[-1] for path in checkpoints if _TIME.search(path.name)}

    def run_of(path: Path) -> tuple[Path, str, str]:
        return path.parent, _QUALITY.sub("", _TIME.sub("", path.name)), times[path][0].lower()

    several = [run for run in grouped(times, run_of) if len(run) > 1]
    folders = folder_names(run[0].parent for run in several)
    names = [*folders.values()]
    if len(names) < len(several):
        names = [f"run{n}" for n, _ in enumerate(several, 1)]
    named = zip(names, several, strict=True)
    return {p: {"run": name, "at": int(times[p][1])} for name, run in named for p in run}


def folder_names(folders: Iterable[Path]) -> dict[Path, str]:
    """Return a unique name for each folder from one part of its path, or {} if there is none.

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


def seeming_runs(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """Return a notice if the names of checkpoints without ``run`` and ``at`` suggest one run."""
    alone = [c.path for id_, c in checkpoints.items() if c.path and (c.run, c.at) == (id_, None)]
    times = times_of(map(Path, sorted(alone)))
    if not times:
        return None
    entry = json.dumps({"path": str(next(iter(times))), **next(iter(times.values()))})
    return (
        f"the names of {listed(times)} differ only in an epoch or a step, which suggests that "
        "they are checkpoints of one run. Each is currently treated as a separate run. If they "
        f"belong to one run, write each as in {entry}."
    )


def mixed_trainings(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """Return a notice if a Trainer's folder has checkpoints of different trainings.

    The state that a Trainer saves contains its logs so far. Therefore, the logs of a checkpoint
    begin with those of the earlier checkpoints of the same training.
    """
    saved = [Path(c.path) for c in checkpoints.values() if c.is_listed and c.path]
    for folders in grouped(saved, lambda path: path.parent):
        logs = [
            (folder, [json.dumps(log) for log in _trainer_state(folder).get("log_history") or []])
            for folder in folders
        ]
        for (folder, log), (later, later_log) in pairwise(logs):
            if log and later_log and later_log[: len(log)] != log:
                return (
                    f"{folder} and {later} seem to be saved by different trainings, because their "
                    "logs in trainer_state.json differ. If so, give each training's checkpoints "
                    "a `run` of their own."
                )
    return None


def grouped(paths: Iterable[Path], key: Callable[[Path], Any]) -> list[list[Path]]:
    """Group paths by key, in order of appearance, and return a list of paths for each key."""
    groups: dict[Any, list[Path]] = {}
    for path in paths:
        groups.setdefault(key(path), []).append(path)
    return [*groups.values()]


def _check_ids(names: list[str]) -> None:
    counts = Counter(names)
    for name in names:
        if not re.fullmatch(_ID_PATTERN, name):
            raise InputError(
                "A checkpoint's id becomes a file name. It must consist of letters, digits, '.', "
                f"'_' and '-', and must not start with '.' or '-'. Found {name!r}.",
                code="config.checkpoint_id",
            )
        if counts[name] > 1:
            raise InputError(
                f"Checkpoint ids must be unique. Found {name!r} twice.", code="config.checkpoint_id"
            )


def _number(text: str, name: str) -> float | None:
    """Return the time in a table's cell as an integer or a float, or None for an empty cell."""
    if not text:
        return None
    try:
        return int(text) if re.fullmatch(r"\d+", text) else float(text)
    except ValueError:
        return _checked_time(text, name)


def _checked_time(at: Any, name: str) -> float:
    if type(at) not in (int, float) or not 0 <= at < float("inf"):
        raise InputError(
            "`at` is the time at which a checkpoint was saved, such as an epoch, and must be a "
            f"number of at least 0. Found {at!r} for checkpoint {name!r}.",
            code="config.checkpoint_time",
        )
    return at


def _trained(
    name: str, value: Any, training: Mapping[str, Any]
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield a checkpoint for each time ``at`` of a run. Without ``at``, yield one at the end."""
    if not isinstance(value, Mapping):
        raise InputError(
            "In a config with `training`, a checkpoint must be a mapping of training arguments. "
            f"Found {value!r} for checkpoint {name!r}.",
            code="config.checkpoint_value",
        )
    times = value.get("at", training.get("at"))
    run = Checkpoint(name, arguments={k: v for k, v in value.items() if k != "at"})
    if times is None:
        yield name, run
        return
    if times == []:
        raise InputError(
            f"A list `at` must contain at least one time. Found an empty list for run {name!r}.",
            code="config.checkpoint_time",
        )
    for at in times if isinstance(times, list) else [times]:
        yield f"{name}-{_checked_time(at, name):.15g}", replace(run, at=at)


def _saved(name: str, value: Any, _: Any) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the checkpoint at a path, or all checkpoints in a folder that a Trainer wrote."""
    given = {"path": value} if isinstance(value, str) else value
    unknown = [str(key) for key in given if key not in _KEYS] if isinstance(given, Mapping) else []
    if not isinstance(given, Mapping) or unknown or not isinstance(given.get("path"), str):
        shown = ", ".join(unknown) if unknown and "path" in given else repr(value)
        raise InputError(
            "In a config without `training`, a checkpoint must be a path, or a mapping with `path` "
            f"and optionally `run`, `at` and `state_dict`. Found {shown} for checkpoint {name!r}.",
            code="config.checkpoint_value",
        )
    run, at, path = given.get("run"), given.get("at"), given["path"]
    run, part = name if run is None else str(run), str(given.get("state_dict") or "") or None
    folders = of_trainer(Path(path))
    if not folders:
        time = None if at is None else _checked_time(at, name)
        yield name, Checkpoint(run, time, path, state_dict=part)
        return
    if at is not None:
        raise InputError(
            f"{path}: `at` must not be set for a folder in which a Trainer saved several "
            "checkpoints, because the Trainer's steps are used as times. Found "
            f"{at!r} for checkpoint {name!r}.",
            code="config.checkpoint_time",
        )
    for number, folder in folders:
        step, path = _trainer_state(folder).get("global_step", number), str(folder)
        yield f"{name}-{number}", Checkpoint(run, step, path, is_listed=True, state_dict=part)


def of_trainer(path: Path) -> list[tuple[int, Path]]:
    """Return the number and the path of each folder ``checkpoint-<number>``, sorted by number."""
    if not path.is_dir():
        return []
    matches = [(_OF_TRAINER.fullmatch(inner.name), inner) for inner in path.iterdir()]
    return sorted((int(match[1]), inner) for match, inner in matches if match and inner.is_dir())


def _trainer_state(folder: Path) -> dict[str, Any]:
    """Return the content of a Trainer's state file, or {} without such a file."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        return {}
    try:
        content = json.loads(state.read_text("utf-8"))
        _checked_time(content["global_step"], folder.name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{state}: the Trainer's state must be JSON with a number `global_step`. Reading the "
            f"file failed: {type(error).__name__}: {error}.",
            code="config.trainer_state",
        ) from error
    return content

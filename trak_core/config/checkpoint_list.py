"""Read a config's checkpoints: ids, paths, the runs that saved the checkpoints, and the times."""

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
_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
# The patterns of the names of files in which a Trainer saves weights.
_TRAINER_WEIGHTS = "model*.safetensors", "adapter_model.*", "pytorch_model*.bin"
# In a file name, `_TIME` matches an epoch or a step, and `_QUALITY` a loss or an accuracy. Without
# the lookbehind, `_TIME` would find the epoch 1 in "sweep_1", because this name ends in "ep_1".
_TIME = re.compile(r"(?<![a-z])(epochs?|ep|steps?|iter(?:ation)?s?)[-_=]?(\d+)", re.I)
_QUALITY = re.compile(r"(?<![a-z])(?:loss|acc(?:uracy)?|auc|f1|error)[-_=]?\d*\.?\d+", re.I)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, and the run (one training of a model) that saved it."""

    run: str  # the name of the run
    at: float | None = None  # the time in training, in any unit; None if it is not known
    path: str | None = None  # the file or folder; None if the pipeline trains the model
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the run's arguments for `train`
    is_in_folder: bool = False  # whether the config names only the folder that contains `path`
    state_dict: str | None = None  # the key of the state dict in the file; None to search for it


def checkpoint_table(
    checkpoints: Mapping[Any, Any] | str, training: Mapping[str, Any] | None
) -> dict[str, Checkpoint]:
    """Return a config's checkpoints by id, sorted by id.

    Args:
        checkpoints: A mapping whose keys are ids, or the path of a table with the columns
            ``checkpoint`` (the ids) and ``path``, and optionally ``run``, ``at`` and
            ``state_dict``.
        training: The config's ``training``, or None if the pipeline does not train. Otherwise, each
            value in ``checkpoints`` contains a run's arguments for ``train``, and ``at`` may be a
            list of the times at which this run saves checkpoints.
    """
    if isinstance(checkpoints, str):
        rows = read_table(Path(checkpoints), ("checkpoint", "path"), ("run", "at", "state_dict"))
        entries: list[tuple[str, Any]] = [
            (name, {"path": path, "run": run or None, "at": _time_in(at, name), "state_dict": key})
            for name, path, run, at, key in rows
        ]
    else:
        entries = [(str(name), value) for name, value in checkpoints.items()]
    # One entry of `checkpoints` can stand for several checkpoints, whose ids begin with the name of
    # the entry. The names are checked first, so that an error shows the name as the user wrote it.
    _check_ids([name for name, _ in entries])
    expand = _saved if training is None else _trained
    pairs = [pair for name, value in entries for pair in expand(name, value, training or {})]
    _check_ids([name for name, _ in pairs])
    table = dict(sorted(pairs))
    for run, ids in runs_of(table).items():
        times = [table[name].at for name in ids]
        if len(ids) > 1 and (None in times or len(set(times)) < len(times)):
            shown = ", ".join(f"{name}: {at}" for name, at in zip(ids, times, strict=True))
            raise InputError(
                "If a run has several checkpoints, each must have a different time `at`, because "
                f"the times determine their order. Found {shown} in run {run!r}.",
                code="config.checkpoint_time",
            )
    return table


def runs_of(checkpoints: Mapping[str, Checkpoint]) -> dict[str, list[str]]:
    """Return the checkpoint ids of each training run, sorted by time. Runs are sorted by name."""
    runs: dict[str, list[str]] = {}
    for name in sorted(checkpoints, key=lambda name: (checkpoints[name].at or 0, name)):
        runs.setdefault(checkpoints[name].run, []).append(name)
    return dict(sorted(runs.items()))


def have_several_times(checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Return whether the checkpoints were saved at different times during training."""
    # If the pipeline trains a model without `at`, it saves a checkpoint at the end of the run. This
    # counts as another time (None). For a user's checkpoint, None means that the time is unknown.
    times = {c.at for c in checkpoints.values() if c.at is not None or c.path is None}
    return len(runs_of(checkpoints)) < len(checkpoints) or len(times) > 1


def times_of(checkpoints: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return the likely ``run`` and ``at`` of checkpoints, judging by the names of their files.

    Checkpoints in the same folder probably belong to one run if their names differ only in an epoch
    or a step, and perhaps in a loss or an accuracy, as in ``epoch=3-val_loss=0.25.ckpt``. The
    result contains no other checkpoints.
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
    """Return a short, unique name for each folder, or {} if there are no such names.

    The names are the last components of the paths. If two of these are equal, the names are the
    components before the last, and so on.

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
    """Return a notice if checkpoints without ``run`` and ``at`` seem to belong to one run."""
    alone = [c.path for id_, c in checkpoints.items() if c.path and (c.run, c.at) == (id_, None)]
    times = times_of(map(Path, sorted(alone)))
    if not times:
        return None
    entry = json.dumps({"path": str(next(iter(times))), **next(iter(times.values()))})
    return (
        f"the names of {listed(times)} differ only in an epoch or a step, which suggests that "
        "they are checkpoints of one run. Each is currently treated as the only checkpoint of its "
        f"run. If they belong to one run, write each in the form {entry}."
    )


def mixed_runs(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """Return a notice if checkpoints in one Trainer's folder seem to be from different runs.

    With each checkpoint, a Trainer saves all logs since the run began. If two checkpoints are from
    the same run, the logs of the later one therefore begin with the logs of the earlier one.
    """
    saved = [Path(c.path) for c in checkpoints.values() if c.is_in_folder and c.path]
    for folders in grouped(saved, lambda path: path.parent):
        logs = [
            (folder, [json.dumps(log) for log in _trainer_state(folder).get("log_history") or []])
            for folder in folders
        ]
        for (folder, log), (later, later_log) in pairwise(logs):
            if log and later_log and later_log[: len(log)] != log:
                return (
                    f"{folder} and {later} seem to be from different training runs, because their "
                    "logs in trainer_state.json differ. If they are, list each checkpoint in "
                    "`checkpoints`, with the name of its `run` and its time `at`."
                )
    return None


def unread_weights(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """Return a notice if a Trainer's folder contains weights that differ from all checkpoints.

    ``trainer.save_model()`` writes such weights. To save time, only the ends of files are compared.
    """
    saved = [Path(c.path) for c in checkpoints.values() if c.is_in_folder and c.path]
    for folder in dict.fromkeys(path.parent for path in saved):
        names = {file.name for kind in _TRAINER_WEIGHTS for file in folder.glob(kind)}
        for file in (folder / name for name in sorted(names) if (folder / name).is_file()):
            others = [step / file.name for _, step in trainer_checkpoints(folder)]
            if not any(other.is_file() and _end_of(file) == _end_of(other) for other in others):
                return (
                    f"{file} is not read, and differs from the weights in all checkpoints of "
                    f"{folder}. Only the folders checkpoint-<step> are explained. To explain this "
                    "file too, copy it and its config to a new folder in `checkpoints`."
                )
    return None


def _end_of(file: Path) -> bytes:
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - 2**24))
        return content.read()


def grouped(paths: Iterable[Path], key: Callable[[Path], Any]) -> list[list[Path]]:
    """Return a list of paths for each value of ``key(path)``, in the order of first appearance."""
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


def _time_in(cell: str, name: str) -> float | None:
    """Return the time in a cell of a table of checkpoints, or None for an empty cell."""
    if not cell:
        return None
    try:
        return int(cell) if re.fullmatch(r"\d+", cell) else float(cell)
    except ValueError:
        return _checked_time(cell, name)


def _checked_time(at: Any, name: str) -> float:
    if type(at) not in (int, float) or not 0 <= at < float("inf"):
        raise InputError(
            "`at` is the time at which a checkpoint was saved, such as an epoch. It must be a "
            f"number that is at least 0. Found {at!r} for checkpoint {name!r}.",
            code="config.checkpoint_time",
        )
    return at


def _trained(
    name: str, value: Any, training: Mapping[str, Any]
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the id and the properties of each checkpoint that a run of the pipeline will save.

    The run saves a checkpoint at each time in ``at``, or one at its end if there is no ``at``.
    """
    if not isinstance(value, Mapping):
        raise InputError(
            "In a config with `training`, each value in `checkpoints` must be a mapping with the "
            f"arguments of a training run. Found {value!r} for {name!r}.",
            code="config.checkpoint_value",
        )
    times = value.get("at", training.get("at"))
    run = Checkpoint(name, arguments={k: v for k, v in value.items() if k != "at"})
    if times is None:
        yield name, run
        return
    if times == []:
        raise InputError(
            "If `at` is a list, it must contain at least one time. Found an empty list for run "
            f"{name!r}.",
            code="config.checkpoint_time",
        )
    for at in times if isinstance(times, list) else [times]:
        yield f"{name}-{_checked_time(at, name):.15g}", replace(run, at=at)


def _saved(name: str, value: Any, _: Any) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the id and the properties of each checkpoint that the entry ``name`` stands for.

    There are several if the path is a folder in which a Trainer saved several checkpoints.
    """
    entry = {"path": value} if isinstance(value, str) else value
    unknown = [str(key) for key in entry if key not in _KEYS] if isinstance(entry, Mapping) else []
    if not isinstance(entry, Mapping) or unknown or not isinstance(entry.get("path"), str):
        shown = ", ".join(unknown) if unknown and "path" in entry else repr(value)
        raise InputError(
            "In a config without `training`, a checkpoint must be a path, or a mapping with `path` "
            f"and optionally `run`, `at` and `state_dict`. Found {shown} for checkpoint {name!r}.",
            code="config.checkpoint_value",
        )
    run, at, path = entry.get("run"), entry.get("at"), entry["path"]
    run, key = name if run is None else str(run), str(entry.get("state_dict") or "") or None
    folders = trainer_checkpoints(Path(path))
    if not folders:
        time = None if at is None else _checked_time(at, name)
        yield name, Checkpoint(run, time, path, state_dict=key)
        return
    if at is not None:
        raise InputError(
            f"{path}: `at` must not be set for a folder in which a Trainer saved several "
            "checkpoints, because the Trainer's steps are used as times. Found "
            f"`at: {at}` for checkpoint {name!r}. Remove `at`.",
            code="config.checkpoint_time",
        )
    for number, folder in folders:
        step, path = _trainer_state(folder).get("global_step", number), str(folder)
        yield f"{name}-{number}", Checkpoint(run, step, path, is_in_folder=True, state_dict=key)


def trainer_checkpoints(path: Path) -> list[tuple[int, Path]]:
    """Return the step and the path of each folder ``path/checkpoint-<step>``, sorted by step."""
    if not path.is_dir():
        return []
    matches = [(_TRAINER_FOLDER.fullmatch(inner.name), inner) for inner in path.iterdir()]
    return sorted((int(match[1]), inner) for match, inner in matches if match and inner.is_dir())


def _trainer_state(folder: Path) -> dict[str, Any]:
    """Return the content of trainer_state.json in ``folder``, or {} if it has no such file."""
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

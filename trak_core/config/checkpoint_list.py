"""Find the checkpoints that a config or its table names: their paths, runs and times.

A run is one training. A checkpoint of a run that says ``at`` comes from along it; the last of each
run is its end.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trak_core.config.read_config import read_table
from trak_core.errors import InputError
from trak_core.spec import ordered, stream_of

_ID_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEYS = ("path", "run", "at", "state_dict")
# What transformers' Trainer calls the folders that it saves.
_OF_TRAINER = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint: the run that it comes from, and when, in any unit, if something says so.

    ``path`` is None where the pipeline trains it; ``arguments`` are what the study's ``train`` gets
    for this run alone. One that ``is_listed`` was found in a Trainer's folder. ``state_dict`` says
    which of a file's weights are taken (``study.load_checkpoint``); None for those that are usual.
    """

    run: str
    at: float | None = None
    path: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_listed: bool = False
    state_dict: str | None = None


def checkpoint_table(
    checkpoints: Mapping[Any, Any] | str, training: Mapping[str, Any] | None
) -> dict[str, Checkpoint]:
    """Return the checkpoints by id, sorted.

    They are the config's: a mapping, or the path of a table with the columns ``checkpoint`` and
    ``path``, and perhaps ``run``, ``at`` and ``state_dict``. With its ``training``, values are
    arguments, with ``at`` for one time or several.
    """
    if isinstance(checkpoints, str):
        rows = read_table(Path(checkpoints), ("checkpoint", "path"), ("run", "at", "state_dict"))
        named = [
            (name, {"path": path, "run": run or None, "at": _number(at, name), "state_dict": part})
            for name, path, run, at, part in rows
        ]
    else:
        named = [(str(name), value) for name, value in checkpoints.items()]
    # Also of those that expand to several: a name given twice is a mistake.
    _check_ids([name for name, _ in named])
    expand = _placed if training is None else _trained
    pairs = [pair for name, value in named for pair in expand(name, value, training or {})]
    names = [name for name, _ in pairs]
    _check_ids(names)
    _check_streams(names)
    table = dict(sorted(pairs))
    for run, ids in runs_of(table).items():
        times = [table[name].at for name in ids]
        if len(ids) > 1 and (None in times or len(set(times)) < len(times)):
            shown = ", ".join(f"{name}: {at}" for name, at in zip(ids, times, strict=True))
            raise InputError(
                "Checkpoints of one run must each say `at`, a number of its own, so that it is "
                f"known which comes last. Found {shown} in run {run!r}."
            )
    return table


def runs_of(checkpoints: Mapping[str, Checkpoint]) -> dict[str, list[str]]:
    """Return the runs, sorted, with the ids of their checkpoints in the order they were saved."""
    runs: dict[str, list[str]] = {}
    for name in sorted(checkpoints, key=lambda name: (checkpoints[name].at or 0, name)):
        runs.setdefault(checkpoints[name].run, []).append(name)
    return dict(sorted(runs.items()))


def come_from_along_runs(checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Return whether a run has several, or they say different times.

    A checkpoint that the pipeline trains and that names no time is of the end, a time too.
    """
    times = {c.at for c in checkpoints.values() if c.at is not None or c.path is None}
    return len(runs_of(checkpoints)) < len(checkpoints) or len(times) > 1


def _check_ids(names: list[str]) -> None:
    counts = Counter(names)
    for name in names:
        if not re.fullmatch(_ID_PATTERN, name):
            raise InputError(
                "A checkpoint's id becomes a file name: letters, digits, '.', '_' and '-', not "
                f"starting with '.' or '-'. Found {name!r}.",
                code="config.checkpoint_id",
            )
        if counts[name] > 1:
            raise InputError(f"A checkpoint's id must be its own. Found {name!r} twice.")


def _check_streams(names: list[str]) -> None:
    streams: dict[int, str] = {}
    for name in names:
        other = streams.setdefault(stream_of(name), name)
        if other != name:
            raise InputError(
                f"Checkpoints must have projections of their own. The ids {other!r} and "
                f"{name!r} give the same one by chance: rename either."
            )


def _number(text: str, name: str) -> float | None:
    """Return a cell of a table as a number, an integer where it is written as one."""
    if not text:
        return None
    try:
        return int(text) if re.fullmatch(r"\d+", text) else float(text)
    except ValueError:
        return _checked_time(text, name)


def _checked_time(at: Any, name: str) -> float:
    if type(at) not in (int, float) or not 0 <= at < float("inf"):
        raise InputError(
            f"`at` says when in its run a checkpoint was saved: a number from 0 on, such as epochs "
            f"or steps. Found {at!r} for checkpoint {name!r}."
        )
    return at


def _trained(
    name: str, value: Any, training: Mapping[str, Any]
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the checkpoints that one training leaves: one, or one for each time."""
    if not isinstance(value, Mapping):
        raise InputError(
            "With `training`, a checkpoint must be a mapping of training arguments; without "
            f"it, the path of a file or folder. Found {value!r} for checkpoint {name!r}, with "
            "`training`.",
            code="config.checkpoint_value",
        )
    times = value.get("at", training.get("at"))
    run = Checkpoint(name, arguments={k: v for k, v in value.items() if k != "at"})
    if times is None:
        yield name, run
        return
    if times == []:
        raise InputError(
            "`at` says at which times a training leaves checkpoints, one or several. Found none "
            f"for run {name!r}. Leave it out for one at the end."
        )
    several = times if isinstance(times, list) else [times]
    twice = [at for i, at in enumerate(several) if at in several[:i]]
    if twice:
        raise InputError(f"`at` must list each time once. Found {twice[0]} twice for run {name!r}.")
    for at in several:
        yield f"{name}-{_checked_time(at, name):.15g}", replace(run, at=at)


def _placed(name: str, value: Any, _: Any) -> Iterator[tuple[str, Checkpoint]]:
    """Yield the checkpoint at a path, or those that a Trainer saved there."""
    given = {"path": value} if isinstance(value, str) else value
    unknown = [str(key) for key in given if key not in _KEYS] if isinstance(given, Mapping) else []
    if not isinstance(given, Mapping) or unknown or not isinstance(given.get("path"), str):
        shown = ", ".join(unknown) if unknown and "path" in given else repr(value)
        raise InputError(
            "Without `training`, a checkpoint must be the path of a file or folder, or a mapping "
            "with `path`, and perhaps `run`, `at` and `state_dict`; with it, a mapping of training "
            f"arguments. Found {shown} for checkpoint {name!r}, without `training`.",
            code="config.checkpoint_value",
        )
    run, at, path = given.get("run"), given.get("at"), given["path"]
    run, part = name if run is None else str(run), str(given.get("state_dict") or "") or None
    folders = _of_trainer(Path(path))
    if not folders:
        time = None if at is None else _checked_time(at, name)
        yield name, Checkpoint(run, time, path, state_dict=part)
        return
    if at is not None:
        raise InputError(
            f"{path}: the checkpoints that a Trainer saved in a folder say `at` themselves, their "
            f"step. Found {at!r} for checkpoint {name!r}; leave it out, or name one folder in it."
        )
    for number, folder in folders:
        step = _step(folder, number)
        listed = Checkpoint(run, step, str(folder), is_listed=True, state_dict=part)
        yield f"{name}-{number}", listed


def _of_trainer(path: Path) -> list[tuple[int, Path]]:
    """Return the numbered folders that a Trainer saved in a folder; none for any other path."""
    if not path.is_dir():
        return []
    folders = [inner for inner in path.iterdir() if inner.is_dir()]
    matches = [(_OF_TRAINER.fullmatch(folder.name), folder) for folder in folders]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def _step(folder: Path, number: int) -> float:
    """Return the step that a Trainer's folder says it was saved at, else that of its name."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        return number
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
        return _checked_time(step, folder.name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{state}: a Trainer's state must be JSON with a number `global_step`. Reading it "
            f"failed: {type(error).__name__}: {error}. Train again, or name the other folders."
        ) from error


def shared_training(
    checkpoints: Mapping[Any, Mapping[str, Any]], training: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Return the ``arguments`` of ``train`` that a config's first runs share, and ``run_seeds``.

    With ``training`` every entry of ``checkpoints`` is a run; those that are added come last.
    """
    runs = {str(run): ordered({**training, **own}) for run, own in [*checkpoints.items()][:count]}
    for own in runs.values():
        own.pop("at", None)
    seeds = {run: own.pop("seed", None) for run, own in runs.items()}
    numbers = [seed for seed in seeds.values() if type(seed) is int]
    shared = next(iter(runs.values()))
    if len({*numbers}) < count or any(own != shared for own in runs.values()):
        shown = [
            f"{run}: {{{', '.join(f'{k}: {v}' for k, v in {'seed': seeds[run], **own}.items())}}}"
            for run, own in runs.items()
        ]
        raise InputError(
            "evaluation.subsets.same_seeds trains as the first runs of `checkpoints` were trained: "
            f"{count} runs, as many as `seeds` says, must each have a `seed` of their own, and all "
            f"other training arguments alike. Found {', '.join(shown)}.",
            code="config.run_seeds",
        )
    return {"arguments": shared, "run_seeds": numbers}

"""Checkpoints and targets, as a config or a table beside it names them."""

import csv
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.spec import stream_of

_ID_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]*"


def read_table(path: Path, columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Read columns of a tab-separated table with a header.

    Args:
        path: The table.
        columns: Names of the columns to read.

    Returns:
        One tuple of stripped strings a row.

    Raises:
        InputError: If the file or a column is missing, if it has no rows, or if a row lacks a cell.
    """
    if not path.is_file():
        raise InputError(f"{path}: the table must exist. Found nothing there.")
    try:
        # Spreadsheets begin UTF-8 with a mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read_rows(csv.DictReader(file, delimiter="\t", strict=True), path, columns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: the table must be tab-separated text in UTF-8. Reading it failed: {error}."
        ) from error


def _read_rows(
    reader: csv.DictReader, path: Path, columns: tuple[str, ...]
) -> list[tuple[str, ...]]:
    found = [*(reader.fieldnames or ())]
    if any(found.count(c) != 1 for c in columns):
        missing = ", ".join(c for c in columns if c not in found) or "none"
        raise InputError(
            f"{path}: the table must be tab-separated with the columns {', '.join(columns)}, each "
            f"once. Missing: {missing}; found {', '.join(found) or 'nothing'}."
        )
    rows = []
    for row in reader:
        cells = tuple((row[c] or "").strip() for c in columns)
        if not all(cells):
            raise InputError(
                f"{path}: every row of the table must fill the columns {', '.join(columns)}. Found "
                f"{', '.join(map(repr, cells))} in line {reader.line_num}."
            )
        rows.append(cells)
    if not rows:
        raise InputError(f"{path}: the table must have rows. Found only a header.")
    return rows


def checkpoint_table(checkpoints: Mapping[Any, Any] | str, *, trained: bool) -> dict[str, Any]:
    """Return checkpoint ids with their paths or training arguments, sorted by id.

    Args:
        checkpoints: The config's ``checkpoints``: a mapping, or the path of a table with the
            columns ``checkpoint`` and ``path``.
        trained: Whether the pipeline trains them; then values are arguments, not paths.

    Raises:
        InputError: If an id is not usable as a file name, stands twice, or shares its projection
            stream with another, or if values are not what ``trained`` asks for.
    """
    if isinstance(checkpoints, str):
        pairs: list[tuple[str, Any]] = [
            (i, p) for i, p in read_table(Path(checkpoints), ("checkpoint", "path"))
        ]
    else:
        pairs = [(str(i), value) for i, value in checkpoints.items()]
    counts = Counter(name for name, _ in pairs)
    streams: dict[int, str] = {}
    for name, value in pairs:
        if not re.fullmatch(_ID_PATTERN, name):
            raise InputError(
                "A checkpoint's id becomes a file name: letters, digits, '.', '_' and '-', not "
                f"starting with '.' or '-'. Found {name!r}."
            )
        if counts[name] > 1:
            raise InputError(f"A checkpoint's id must be its own. Found {name!r} twice.")
        if isinstance(value, str) == trained:
            raise InputError(
                "With `training`, a checkpoint must be a mapping of training arguments; without "
                f"it, the path of a file or folder. Found {value!r} for checkpoint {name!r}, "
                f"{'with' if trained else 'without'} `training`."
            )
        other = streams.setdefault(stream_of(name), name)
        if other != name:
            raise InputError(
                f"Checkpoints must have projections of their own. The ids {other!r} and "
                f"{name!r} give the same one by chance: rename either."
            )
    return dict(sorted(pairs))


def target_ids(targets: list[int | str] | str) -> list[int | str]:
    """Return an experiment's target ids.

    Args:
        targets: The ids, or the path of a table with the column ``id``; ids there count as
            integers if all of them are written as one is, so that 0007 stays text.

    Raises:
        InputError: If the table is missing or malformed.
    """
    if not isinstance(targets, str):
        return list(targets)
    ids = [row[0] for row in read_table(Path(targets), ("id",))]
    integers = all(re.fullmatch(r"0|-?[1-9]\d*", i) for i in ids)
    return [int(i) for i in ids] if integers else list(ids)

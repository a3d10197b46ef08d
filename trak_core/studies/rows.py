"""Read the rows of a table or of JSON lines, as dicts, with their ids."""

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd

from trak_core.errors import InputError
from trak_core.study.columns import short_columns
from trak_core.study.targets import parse_line

_READERS = {
    ".csv": lambda path: pd.read_csv(path, keep_default_na=False),
    ".tsv": lambda path: pd.read_csv(path, sep="\t", keep_default_na=False),
    ".parquet": pd.read_parquet,
}


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` file, in order.

    Raises:
        InputError: If the file is not there, has another ending, can't be read, or has no rows.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"study_arguments: rows must be in a file. Found nothing at {path} (from "
            f"{Path.cwd()}).",
            code="studies.missing_rows",
        )
    try:
        if file.suffix == ".jsonl":
            lines = enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1)
            rows: list[Any] = [parse_line(number, line) for number, line in lines if line.strip()]
        elif file.suffix in _READERS:
            rows = _READERS[file.suffix](file).to_dict("records")
        else:
            raise ValueError(f"its ending is {file.suffix or 'none'}")
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it has no rows" if not rows else "a line is not a JSON object")
    except (ValueError, OSError, ImportError) as error:
        raise InputError(
            f"{path}: rows must be .jsonl (a JSON object a line), .csv, .tsv or .parquet. Reading "
            f"it failed: {error}.",
            code="studies.rows",
        ) from error
    return rows


def ids_of(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the field ``id`` of all rows; where one has none, 0, 1, 2 and so on."""
    if all("id" in row for row in rows):
        return [row["id"] for row in rows]
    return list(range(len(rows)))


def columns_from(rows: Sequence[Mapping[str, Any]], used: Container[str]) -> pd.DataFrame:
    """Return the rows' fields as columns: those that the model doesn't get, and are short."""
    names = dict.fromkeys(name for row in rows for name in row if name not in used)
    return short_columns({name: [row.get(name) for row in rows] for name in names})


def used_by(*templates: str | None) -> set[str]:
    """Return the fields that templates such as ``"{prompt}{completion}"`` fill in."""
    parts = (part for template in templates if template for part in Formatter().parse(template))
    return {re.split(r"[.\[]", name)[0] for _, name, _, _ in parts if name}


def field(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's field, or say which it has."""
    if name not in row:
        raise InputError(
            f"study_arguments: a field must be one of the rows'. Found {name}; a row has "
            f"{', '.join(row)}.",
            code="studies.field",
        )
    return row[name]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def filled_in(template: str, row: Mapping[str, Any]) -> str:
    """Return a template such as ``"{prompt} {completion}"`` with a row's fields, none empty."""
    row = {key: value for key, value in row.items() if not _is_missing(value)}
    try:
        return template.format_map(row)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise InputError(
            f"study_arguments: a row must have the fields of the template {template!r}. Found one "
            f"with {', '.join(row)}: {str(dict(row))[:80]}.",
            code="studies.template",
        ) from error

"""Read the tables that a config names: checkpoints with their paths, and ids of targets."""

import csv
import re
from pathlib import Path

from trak_core.errors import InputError

# In place of ids: every sample of target_data().
ALL_TARGETS = "all"


def read_table(
    path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """Return rows of stripped strings from columns of a tab-separated table with a header.

    Columns and their cells must be there; ``optional`` ones may lack, or be empty.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: the table must exist. Found nothing there.", code="config.missing_table"
        )
    try:
        # Spreadsheets begin UTF-8 with a mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t", strict=True)
            return _read_rows(reader, path, columns, optional)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: the table must be tab-separated text in UTF-8. Reading it failed: {error}."
        ) from error


def _read_rows(
    reader: csv.DictReader, path: Path, columns: tuple[str, ...], optional: tuple[str, ...]
) -> list[tuple[str, ...]]:
    header = [*(reader.fieldnames or ())]
    if any(header.count(c) != 1 for c in columns) or any(header.count(c) > 1 for c in optional):
        missing = ", ".join(c for c in columns if c not in header) or "none"
        raise InputError(
            f"{path}: the table must be tab-separated with the columns {', '.join(columns)}, each "
            f"once. Missing: {missing}; found {', '.join(header) or 'nothing'}."
        )
    rows = []
    for row in reader:
        cells = tuple((row[c] or "").strip() for c in columns)
        if not all(cells):
            raise InputError(
                f"{path}: every row of the table must fill the columns {', '.join(columns)}. Found "
                f"{', '.join(map(repr, cells))} in line {reader.line_num}."
            )
        rows.append((*cells, *((row.get(c) or "").strip() for c in optional)))
    if not rows:
        raise InputError(f"{path}: the table must have rows. Found only a header.")
    return rows


def target_ids(targets: list[int | str] | str) -> list[int | str] | None:
    """Return an experiment's target ids, which are given or in a table's column ``id``.

    None for ``all``: what target_data() has.

    Ids of a table count as integers if all of them are written as one is, so that 0007 stays text.
    """
    if targets == ALL_TARGETS:
        return None
    if not isinstance(targets, str):
        return list(targets)
    ids = [row[0] for row in read_table(Path(targets), ("id",))]
    integers = all(re.fullmatch(r"0|-?[1-9]\d*", i) for i in ids)
    return [int(i) for i in ids] if integers else list(ids)

"""Read the targets of an experiment from the study, or from a file that the experiment names.

The file can be a Python file that defines ``target_data()`` and optionally ``target_ids()``, as a
study does. Any other file contains rows, which ``trak_core.data.row_files`` reads. The study's
function ``encode(**row)`` converts each row to a sample. The field ``id`` of a row is the sample's
id. If the rows have no such field, the ids are 0, 1, 2, ...
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trak_core.data.row_files import RowFile, RowSamples, parsed_json, read_rows, shortened
from trak_core.errors import InputError
from trak_core.study.dataset_split import Split, checked_ids, users_code
from trak_core.study.study import Study


def split_of(
    study: Study, name: str, targets: Sequence[int | str] | None, question: Path | None
) -> Split:
    """Return the training samples, or the targets of an experiment.

    Args:
        study: The study that contains the samples.
        name: ``TRAIN`` for the training samples, or the name of an experiment.
        targets: The ids of the samples to return, in order. None returns all samples.
        question: The file that contains the experiment's targets, or None if the study's
            ``target_data()`` contains them.
    """
    if question is None:
        return study.split(name, targets)
    if question.suffix == ".py":
        split = Study.load(question).split("target", None)
    else:
        ids, rows = read_questions(question)
        study.function("encode")  # Raises an error if the study has no encode().
        split = Split(RowSamples(rows, partial(_encoded, study)), ids)
    return split if targets is None else split.take(targets)


def read_questions(path: Path) -> tuple[list[int] | list[str], RowFile]:
    """Return the ids of the targets in a file, and the rows without the field ``id``.

    It is an error if two rows have different fields, or if a field is null.
    """
    rows = read_rows(path)
    ids = checked_ids(rows.ids(), len(rows), f"{path}: the field id")
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys() or None in row.values():
            raise InputError(
                f"{rows.place(index)}: every row must have the same fields, and no field may be "
                f"null. Found {shortened(row)}. The first row has the fields "
                f"{', '.join(rows[0]) or 'none'}.",
                code="data.fields",
            )
    fields = [{key: value for key, value in row.items() if key != "id"} for row in rows]
    return ids, replace(rows, rows=fields)


def encoded_line(
    study: Study, line: str | bytes | Mapping[str, Any], number: int
) -> tuple[int | str, Any, dict[str, Any]]:
    """Convert a line that a user asks about to a sample, with the study's ``encode``.

    A line is a JSON object with the sample's fields, a dict of these fields, or a text, which does
    not begin with "{". A text becomes the value of the field ``text``.

    Returns:
        The sample's id (the field ``id``, or ``number`` if the line has no such field), the sample,
        and the fields that tables show as columns.
    """
    line = line if isinstance(line, Mapping) else _parsed_line(line)
    fields = {key: value for key, value in line.items() if key != "id"}
    (own_id,) = checked_ids([line.get("id", number)], 1, "The field id of a line")
    # If encode() fails, the message shows its signature. From it, the user may see that encode()
    # has no parameter `text` for a plain text.
    sample = _encoded(study, fields, str(inspect.signature(study.function("encode"))))
    return own_id, sample, {k: v for k, v in fields.items() if k not in study.fields_read}


def _encoded(study: Study, fields: Mapping[str, Any], signature: str = "()") -> Any:
    with users_code(f"{study.path}: encode{signature} of the fields {shortened(fields)},"):
        return study.function("encode")(**fields)


def _parsed_line(line: str | bytes) -> dict[str, Any]:
    try:
        text = (line.decode("utf-8-sig") if isinstance(line, bytes) else line).strip()
        return parsed_json(text) if text.startswith("{") else {"text": text}
    except ValueError as error:
        raise InputError(
            "A line must be plain text in UTF-8, or a JSON object as in an experiment's `data`. "
            f"Found {error}.",
            code="queries.line",
        ) from error

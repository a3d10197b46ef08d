"""Read the targets of an experiment: the study's own, or those in a file that the experiment names.

A Python file has ``target_data()``, and perhaps ``target_ids()``, as a study has. In JSON lines, or
a table with a header whose cells tabs or commas separate, each line is one target: the study's
``encode(**line)`` makes a sample of it. A field ``id`` is its id, if all lines have one; else they
are numbered from 0.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.study.dataset_split import Split, checked_ids, users_code
from trak_core.study.study import Study

_PYTHON, _LINES = ".py", ".jsonl"
# Endings of tables, and what separates their cells.
TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Samples that the study's ``encode`` makes from lines."""

    study: Study
    path: Path
    lines: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        encode = self.study.function("encode")
        line = f"line {self.numbers[index]} of {self.path}, {shortened(self.lines[index])}"
        with users_code(f"{self.study.path}: encode() of {line},"):
            try:
                return encode(**self.lines[index])
            except InputError as error:
                place = f"{self.path}, line {self.numbers[index]}"
                raise InputError(f"{place}: {error}", code=error.code) from error


def shortened(line: Mapping[str, Any]) -> str:
    """Return a line as JSON, or its beginning."""
    text = json.dumps(line, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {twice!r} stands twice")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def parse_line(number: int, line: str) -> Any:
    """Return ``parsed_json`` of a line, whose ``ValueError`` names the line."""
    try:
        return parsed_json(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def parsed_json(line: str) -> Any:
    """Return the JSON of a line, which must be able to say one thing only.

    A ``ValueError`` says why it can't: if it is no JSON, has a field twice, a number that is not
    finite or half of a surrogate pair, or is nested too deep.
    """
    try:
        value = json.loads(
            line, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite
        )
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        reason = "half of a surrogate pair, which is no text"
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:
        reason = str(error).split(":")[0]
    raise ValueError(f"{reason}, in {line[:80]!r}")


def rows_of_table(text: str, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the fields of a table's rows, with the number of the line where each begins.

    A ``ValueError`` names that line if a row has other cells than the header or wrong quotes, or
    the header a name twice.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, number = None, 1
    try:
        for cells in reader:
            if cells and header is None:
                header = cells
            elif cells and header is not None:
                if len(cells) != len(header):
                    n = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
                    raise ValueError(f"line {number} has {n}, the header {len(header)}")
                yield number, _unique(list(zip(header, cells, strict=True)))
            # Quoted cells may have several lines.
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number} begins a row with wrong quotes: {error}") from error


def _read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Return the fields of a file's lines that are not empty, by their numbers, from 1."""
    try:
        # Spreadsheets begin UTF-8 with a mark.
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix in TABLES:
            lines: dict[int, Any] = dict(rows_of_table(text, TABLES[path.suffix]))
        else:
            # Not splitlines(): JSON's texts may hold other ends of lines.
            numbered = enumerate(text.split("\n"), 1)
            lines = {number: parse_line(number, line) for number, line in numbered if line.strip()}
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: {_LINES} must hold JSON, and {' and '.join(TABLES)} cells below a header, on "
            f"every line. Reading it failed: {error}."
        ) from error
    first = next(iter(lines.values()), None)
    keys = first.keys() if isinstance(first, dict) else {}
    for number, line in lines.items():
        if not isinstance(line, dict) or line.keys() != keys or None in [*line, *line.values()]:
            raise InputError(
                f"{path}: every line must fill the same fields, none with null, for the study's "
                f"encode(). Found {shortened(line)} in line {number}; the first has "
                f"{', '.join(keys) or 'none'}."
            )
    if not lines:
        raise InputError(f"{path}: there must be questions. Found none.")
    return lines


def split_of(
    study: Study, name: str, targets: Sequence[int | str] | None, question: Path | None
) -> Split:
    """Return the training samples, or the targets of an experiment.

    ``targets`` are their ids, in order; None for all. ``question`` is the experiment's own file,
    whose lines the study encodes; None for the study's ``target_data()``.
    """
    if question is None:
        return study.split(name, targets)
    if question.suffix == _PYTHON:
        split = Study.load(question).split("target", None)
    else:
        split = _encoded_targets(question, study)
    return split if targets is None else split.take(targets)


def read_questions(path: Path) -> tuple[list[int] | list[str], list[dict[str, Any]], list[int]]:
    """Return ids of the targets in a file of lines, their fields without ``id``, their lines."""
    numbered = _read_lines(path)
    lines = list(numbered.values())
    ids: list[Any] = [line.pop("id") for line in lines if "id" in line] or [*range(len(lines))]
    if path.suffix in TABLES and all(str(i).isdecimal() and str(int(i)) == str(i) for i in ids):
        ids = [int(i) for i in ids]
    return checked_ids(ids, len(lines), f"{path}: the field id"), lines, list(numbered)


def _encoded_targets(path: Path, study: Study) -> Split:
    ids, lines, numbers = read_questions(path)
    study.function("encode")
    return Split(_Encoded(study, path, lines, numbers), ids)

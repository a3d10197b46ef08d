"""Read samples from .jsonl, .json, .csv, .tsv and .parquet files, and from saved data sets.

A sample is read as a row, which is a dict of fields. Values are not converted: cells of .csv and
.tsv files are texts, and values from JSON and Parquet keep their types. Callers convert texts to
numbers with ``as_number`` and ``class_number`` where they need numbers.
"""

import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trak_core.errors import InputError

LINES, LIST, PARQUET = ".jsonl", ".json", ".parquet"
_SPLITS = "dataset_dict.json"  # A folder with this file is a saved DatasetDict.
# The character that separates the cells of a table, by the ending of the file's name.
TABLES = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (LINES, LIST, *TABLES, PARQUET)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")
_TRUTHS = {"true": 1, "false": 0}


class _JsonFloat(float):
    """A float from a JSON file, whose ``str`` is the text in the file, such as "1.10" for 1.1."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: str) -> "_JsonFloat":
        number = super().__new__(cls, text)
        if not math.isfinite(number):
            raise ValueError(f"{text} is not a finite number")
        number._text = text
        return number

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True)
class RowFile(Sequence[dict[str, Any]]):
    """The rows of one file, in order. Each row is a dict of its fields.

    Attributes:
        path: The file or folder that contains the rows.
        rows: The fields of each row.
        numbers: The number of the line in which each row begins, counted from 1. If the file does
            not consist of lines, as in Parquet, these are the numbers of the rows. If the rows are
            the images in a folder, ``numbers`` is empty.
    """

    path: Path
    rows: list[dict[str, Any]]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def noun(self) -> str:
        """The word for the entries of ``numbers`` in messages: "line" or "row"."""
        return "line" if self.path.suffix in {LINES, *TABLES} else "row"

    def place(self, index: int) -> str:
        """Return a string with the file and line of row ``index``, for error messages."""
        if not self.numbers:
            return f"{self.path}, {self.rows[index].get('id', index)}"
        return f"{self.path}, {self.noun} {self.numbers[index]}"

    def column(self, name: str) -> list[Any]:
        """Return the value of the field ``name`` in each row, or None if a row lacks the field.

        The texts in .csv and .tsv files are converted to integers or floats if this loses nothing:
        every text in the column must be the text that Python writes for the number. For example,
        ``007`` and ``1.10`` stay texts.
        """
        values = [row.get(name) for row in self.rows]
        if self.path.suffix not in TABLES:
            return values
        numbers = [n for n in map(as_number, values) if n is not None and abs(n) < 2**53]
        for kind in (int, float):
            kept = [kind(number) for number in numbers]
            written = [{str(number), str(number).removesuffix(".0")} for number in kept]
            if len(kept) == len(values) and all(map(set.__contains__, written, values)):
                return kept
        return values

    def ids(self) -> list[int] | list[str]:
        """Return the field ``id`` of each row, or 0, 1, 2, ... if no row has an id.

        Ids from .csv and .tsv files are converted to integers if all of them are texts of 64-bit
        integers without leading zeros. Otherwise, they stay texts.

        Raises:
            InputError: If only some rows have an id, if some ids are integers and others are texts,
                if an id occurs twice, or if the field is named ``ID`` instead of ``id``.
        """
        if all(row.get("id") is None for row in self.rows):
            others = (name for name in self.rows[0] if name != "id")
            near = [name for name in others if name.strip().casefold() == "id"]
            if near:
                raise InputError(
                    f"{self.path}: ids must be in the field `id`. Found the field {near[0]!r}. "
                    "Rename it to id if it contains ids. Otherwise, give it a name that does not "
                    "resemble id. The rows then have the ids 0, 1, 2, ...",
                    code="data.near_id",
                )
            return list(range(len(self.rows)))
        ids: list[Any] = [row.get("id") for row in self.rows]
        if self.path.suffix in TABLES and all(map(_is_whole, ids)):
            ids = [int(value) for value in ids]
        first: dict[Any, int] = {}
        for index, value in enumerate(ids):
            kind = type(value)
            if kind not in {int, str} or kind is not type(ids[0]) or value == "":
                raise InputError(
                    f"{self.place(index)}: `id` must be an integer in every row, a text in every "
                    f"row, or missing in every row. Found {value!r}. The first id is {ids[0]!r}. "
                    "Change the ids that differ in type.",
                    code="data.mixed_ids",
                )
            before = first.setdefault(value, index)
            if before != index:
                raise InputError(
                    f"{self.place(index)}: ids must be unique. Found {value!r}, which is also "
                    f"the id at {self.place(before)}. Change one of the two ids.",
                    code="data.repeated_id",
                )
        return ids


class FromRow:
    """A sample that keeps the row from which it was made, because pages show the row to the user.

    Attributes:
        row: The fields of the row.
        place: Where the row is in its file, such as "line 2", or "" if this is unknown.
        picture: A function that returns the row's image as a PIL image. None without an image.
    """

    row: Mapping[str, Any]
    place: str = ""
    picture: Callable[[], Any] | None = None

    @classmethod
    def of(
        cls, row: Mapping[str, Any], values: Iterable[Any], picture: Callable[[], Any] | None = None
    ) -> Self:
        """Return a sample with the entries ``values``, which the caller has made from ``row``."""
        sample = cls(values)  # pyright: ignore[reportCallIssue] -- of tuple or dict
        sample.row, sample.picture = row, picture
        return sample

    def replaced(self, values: Iterable[Any]) -> Self:
        """Return a sample with the entries ``values`` and the same row as this sample."""
        sample = type(self)(values)  # pyright: ignore[reportCallIssue] -- of tuple or dict
        vars(sample).update(vars(self))
        return sample


class RowSample(FromRow, tuple[Any, ...]):
    """A sample as a tuple, which consists of the model's inputs and then the label."""


class NamedRowSample(FromRow, dict[str, Any]):
    """A sample as a dict, which contains the model's inputs by name and ``labels``."""


@dataclass(frozen=True, slots=True)
class RowSamples(Sequence[Any]):
    """The samples in a file. On each access, the function ``sample`` makes a sample from its row.

    If ``sample`` raises an ``InputError``, the message begins with the file and line of the row.
    """

    rows: RowFile
    sample: Callable[[dict[str, Any]], Any]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        try:
            sample = self.sample(self.rows[index])
        except InputError as error:
            raise InputError(f"{self.rows.place(index)}: {error}", error.code) from error
        if isinstance(sample, FromRow) and self.rows.numbers:
            sample.place = f"{self.rows.noun} {self.rows.numbers[index]}"
        return sample


def read_rows(path: str | Path) -> RowFile:
    """Return the rows of a file whose name ends in one of ``SUFFIXES``, or of a saved data set.

    A saved data set is a folder that ``Dataset.save_to_disk`` of the package ``datasets`` wrote. In
    its ``ClassLabel`` columns, the numbers of classes are replaced by their names, and -1 by None.

    Each line of a ``.jsonl`` file is a JSON object. A ``.json`` file is a list of such objects, or
    has the form of a ``.jsonl`` file. The first line of a ``.csv`` or ``.tsv`` file contains the
    names of the fields, and all of its rows have the same number of cells. Files of text must be in
    UTF-8. Empty lines are skipped.

    Raises:
        InputError: If the file does not exist, has no rows, or has a line that cannot be read.
    """
    file = Path(path)
    if not (file.is_file() or is_saved_dataset(file) or (file / _SPLITS).is_file()):
        raise InputError(
            "Rows must be in a file, or in a folder that Dataset.save_to_disk wrote. Found nothing "
            f"at {path}. Correct this path. The working folder is {Path.cwd()}.",
            code="data.missing_rows",
        )
    try:
        if file.is_dir():
            numbered = dict(enumerate(map(_without_none, _saved_rows(file)), 1))
        elif file.suffix == PARQUET:
            numbered = dict(enumerate(map(_without_none, _parquet_rows(file)), 1))
        elif file.suffix in SUFFIXES:
            numbered = dict(_numbered_rows(file))
        else:
            raise ValueError(f"its ending is {file.suffix or 'none'}")
        rows = list(numbered.values())
        if not rows:
            raise ValueError("it has no rows")
        others = [number for number, row in numbered.items() if not isinstance(row, dict)]
        if others:
            noun = "line" if file.suffix == LINES else "row"
            raise ValueError(f"{noun} {others[0]} is not a JSON object")
    except InputError:
        raise
    except (
        Exception
    ) as error:  # A damaged .parquet can raise any error, with several lines of text.
        reason = " ".join(str(error).split()).removesuffix(".")
        raise InputError(
            f"{path}: rows must be in .jsonl (one JSON object per line), .json (a list of "
            f"objects), .csv, .tsv, .parquet or a saved Dataset. Reading it failed: {reason}.",
            code="data.rows",
        ) from error
    return RowFile(file, rows, list(numbered))


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``datasets.Dataset.save_to_disk`` wrote a folder."""
    return all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def _saved_rows(folder: Path) -> list[dict[str, Any]]:
    if (folder / _SPLITS).is_file():
        names = json.loads((folder / _SPLITS).read_text())["splits"]
        raise InputError(
            f"{folder}: rows must be in a single Dataset. Found a DatasetDict. Use the folder of "
            f"one of its splits: {', '.join(str(folder / name) for name in names)}.",
            code="data.splits",
        )
    from datasets import ClassLabel, Dataset  # pyright: ignore[reportMissingImports] -- optional

    data = Dataset.load_from_disk(str(folder))
    # The data set may have been saved with a format, which would convert values or omit columns.
    rows: list[dict[str, Any]] = data.with_format(None).to_list()
    for column, feature in data.features.items():
        if not isinstance(feature, ClassLabel):
            continue
        if any(as_number(name) not in {None, i} for i, name in enumerate(feature.names)):
            raise InputError(
                f"{folder}: in the column {column}, a class must not have the number of another "
                f"class as its name. Found the names {', '.join(feature.names)}. Save the data set "
                f"with the numbers that training used: cast_column({column!r}, Value('int64')).",
                code="data.class_names",
            )
        for row in rows:
            number = row[column]
            row[column] = None if number in {None, -1} else feature.names[number]
    return rows


def _parquet_rows(file: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet  # pyright: ignore[reportMissingImports] -- optional

    # pandas.read_parquet is not used, because it converts integers to floats if a value is missing.
    # A file that pandas wrote can contain an index. It is not a field, unless its name is id.
    table = parquet.read_table(file)
    index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    unread = [name for name in index if isinstance(name, str) and name != "id"]
    return table.drop_columns(unread).to_pylist()


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the keys that Arrow has added to the objects in its fields.

    Arrow gives all objects of a column the same keys. If an object lacks a key, Arrow adds it with
    the value None. As in TRL, keys with the value None are removed, except for the `content` of a
    message. The fields of the row itself are kept.
    """

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {"content"} if "role" in value else ()
            return {k: stripped(v) for k, v in value.items() if v is not None or k in kept}
        return [stripped(part) for part in value] if isinstance(value, list) else value

    return {name: stripped(value) for name, value in row.items()}


def _numbered_rows(file: Path) -> Iterator[tuple[int, Any]]:
    # read_text() is not used, because it would change line breaks in cells. The encoding utf-8-sig
    # skips the byte order mark that spreadsheet programs write.
    written = file.read_bytes()
    if written[:2] == b"\x1f\x8b":
        raise ValueError("it is compressed by gzip. Decompress it")
    try:
        text = written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {number} is not in UTF-8. Save the file as UTF-8") from error
    if file.suffix in TABLES:
        yield from _rows_of_table(text, TABLES[file.suffix])
        return
    if file.suffix == LIST and text.lstrip()[:1] == "[":
        yield from enumerate(parsed_json(text), 1)
        return
    # splitlines() would also split at characters such as U+2028, which texts in JSON can contain.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, parsed_json(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _rows_of_table(text: str, separator: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield a pair for each row of a table: the number of its first line, and its fields.

    Raises:
        ValueError: If the quotes in a row are wrong, if its number of cells differs from that of
            the header, or if a name in the header occurs twice or begins or ends with a space.
    """
    csv.field_size_limit(sys.maxsize)  # The default of 131,072 characters is too small for texts.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header, number = list[str](), 1
    try:
        for cells in reader:
            # Remove empty cells at the end of a row, which spreadsheet programs can write.
            while len(cells) > len(header) and not cells[-1]:
                cells.pop()
            if cells and not header:
                header = list(_unique([(cell, None) for cell in cells]))
                spaced = [name for name in header if name != name.strip()]
                if spaced:
                    raise ValueError(f"the field name {spaced[0]!r} begins or ends with a space")
                others = [mark for mark in ";,\t|" if mark != separator and mark in header[0]]
                if len(header) == 1 and others:
                    raise ValueError(
                        f"the header has only one cell, {header[0][:80]!r}. Cells must be "
                        f"separated by {separator!r}, but the header seems to use {others[0]!r}"
                    )
            elif cells:
                if len(cells) != len(header):
                    n = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
                    raise ValueError(f"line {number} has {n}, but the header has {len(header)}")
                yield number, dict(zip(header, cells, strict=True))
            # A row can extend over several lines, because a quoted cell can contain line breaks.
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number} begins a row with wrong quotes: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {twice!r} occurs twice")
    return fields


def parsed_json(line: str) -> Any:
    """Return the value of a JSON text. The ``str`` of a float is as in the text, such as "1.10".

    Raises:
        ValueError: If the text is not JSON or is nested too deeply, or if it contains the same
            field twice, a number that is not finite, or half of a surrogate pair.
    """
    try:
        value = json.loads(
            line, object_pairs_hook=_unique, parse_constant=_JsonFloat, parse_float=_JsonFloat
        )
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        reason = "half of a surrogate pair, which is not valid text"
    except RecursionError:
        reason = "it is nested too deeply"
    except json.JSONDecodeError as error:
        reason = error.msg + (f" in line {error.lineno}" if error.lineno > 1 else "")
        line = error.doc[error.doc.rfind("\n", 0, error.pos) + 1 :]
    except ValueError as error:
        reason = str(error).split(":")[0]
    raise ValueError(f"{reason}, in {line[:80]!r}")


def as_number(value: Any) -> int | float | None:
    """Return a number, or the number that a text contains, or None for any other value.

    The number must be finite. A text must be a decimal number in Python's notation, such as
    "-1.5e3", or else true (1) or false (0), in upper or lower case. Thousands separators and
    decimal commas are not allowed.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = str(value).strip() if isinstance(value, int | str) else ""
    if not _NUMBER.fullmatch(text):
        return _TRUTHS.get(text.lower())
    number = float(text)
    is_whole = text.lstrip("+-").isdigit() and abs(number) < 2**63
    return (int(text) if is_whole else number) if math.isfinite(number) else None


def _is_whole(value: Any) -> bool:
    """Return whether a value is a text of a 64-bit integer, without leading zeros or "+"."""
    is_short = isinstance(value, str) and _WHOLE.fullmatch(value) is not None
    return is_short and -(2**63) <= int(value) < 2**63


def class_number(value: Any) -> int | None:
    """Return the class number 0, 1, 2, ... that an integer or a text contains, else None."""
    if _is_whole(value):
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def shortened(row: Mapping[str, Any]) -> str:
    """Return a row as JSON, shortened to 80 characters."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."

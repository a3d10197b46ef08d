"""Say what a ready-made study consists of, read its rows, and find functions that it names."""

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd
from torch import nn

from trak_core.errors import InputError
from trak_core.study.read_targets import parse_line, rows_of_table, shortened
from trak_core.study.sample_columns import short_columns
from trak_core.study.study import Study


@dataclass(frozen=True, slots=True)
class ReadyStudy:
    """The functions of a study (``trak_core.study.study`` says what each does).

    ``to_change_samples`` says which of its arguments has the model get other samples.
    """

    to_change_samples: str
    make_model: Callable[[], nn.Module]
    train_data: Callable[[], Any]
    target_data: Callable[[], Any]
    train_ids: Callable[[], Sequence[int | str]]
    target_ids: Callable[[], Sequence[int | str]]
    encode: Callable[..., Any]
    describe: Callable[[Any], str]
    train_columns: Callable[[], pd.DataFrame]
    target_columns: Callable[[], pd.DataFrame]
    token_texts: Callable[[Any], list[str]] | None = None
    class_names: Callable[[], list[str]] | None = None


class Rows:
    """Samples that are made of rows as they are needed; errors name the place in their file."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        sample: Callable[[Mapping[str, Any]], Any],
        file: str | None = None,
    ) -> None:
        self._rows, self._sample, self._file = rows, sample, file

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._sample(self._rows[index])
        except InputError as error:
            if self._file is None:
                raise
            place = _place(self._file, range(len(self))[index])
            raise InputError(f"{place}: {error}", code=error.code) from error


def _place(file: str, index: int) -> str:
    """Return where a row stands; in a table, whose cells may have several lines, as a row."""
    if Path(file).suffix != ".jsonl":
        return f"{file}, row {index + 1}"
    lines = enumerate(Path(file).read_text(encoding="utf-8-sig").split("\n"), 1)
    return f"{file}, line {[number for number, line in lines if line.strip()][index]}"


def encoder(
    sample: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any], names: Iterable[str]
) -> Callable[..., Any]:
    """Return the study's ``encode``: a sample of a line, which must have the fields ``names``.

    ``row`` is one that has them, for who must be told what a line is. Where one name is enough, a
    plain line, which comes as the field ``text``, is that field.
    """
    example = {name: row.get(name, "...") for name in names}
    only = next(iter(example)) if len(example) == 1 else "text"

    def encode(**line: Any) -> Any:
        if only not in line and "text" in line:
            line[only] = line.pop("text")
        if not example.keys() <= line.keys():
            raise InputError(
                f"A line must be a JSON object with {' and '.join(example)}, such as "
                f"{shortened(example)}. Found {shortened(line)}.",
                code="studies.line",
            )
        return sample(line)

    return encode


# A character has four bytes at most, and a token of it one at least.
_MOST_PIECES = 4


def decoded_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text that a tokenizer of Hugging Face's makes of all.

    A token that ends within a character adds "", and the one that ends it the character. Put
    together they are the text, with the spaces that a token by itself doesn't have. The cost grows
    with the number of tokens: each is decoded behind the few before it.
    """

    def decoded(first: int, end: int) -> str:
        # Cleaning takes spaces away before what comes later.
        return tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)

    texts, first, whole = list[str](), 0, 0
    for end in range(1, len(ids) + 1):
        before, text = decoded(first, whole), decoded(first, end)
        is_open = text.endswith("\N{REPLACEMENT CHARACTER}") and end - whole < _MOST_PIECES
        if is_open and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, whole = whole, end
    return texts


def needed(package: str, extra: str) -> None:
    """Refuse to go on without a package, and say which extra of this one brings it."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"This study must find the package {package}. Found none: call "
            f"`{Path(sys.executable)} -m pip install {package}`, or install "
            f"'trak-core[{extra}]', which has all that such studies need.",
            code="studies.package",
        )


def function_at(place: str, argument: str) -> Callable[..., Any]:
    """Return the function that ``file.py:function`` names."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        problem = f"no file {file} in {Path.cwd()}" if path.suffix == ".py" else place
        raise InputError(
            f"study_arguments: {argument} must name a function as file.py:function. Found "
            f"{problem}.",
            code="studies.function",
        )
    function = getattr(Study.load(path).module, name, None)
    if not callable(function):
        raise InputError(
            f"study_arguments: {argument} must name a function of {file}. Found no {name} there.",
            code="studies.function",
        )
    return function


def _read_table(path: Path, delimiter: str) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            # Else cells beyond the header's would move all others by a column.
            table = pd.read_csv(path, sep=delimiter, keep_default_na=False, index_col=False)
        except (pd.errors.ParserError, pd.errors.ParserWarning):
            _check_cells(path, delimiter)
            raise
    # So pandas fills up a row that ends early.
    last = table.iloc[:, -1]
    if (last.isna() | last.eq("")).any():
        _check_cells(path, delimiter)
    return table


def _check_cells(path: Path, delimiter: str) -> None:
    """Refuse the first line that has other cells than the header."""
    for _ in rows_of_table(path.read_text(encoding="utf-8-sig"), delimiter):
        pass


_READERS = {
    ".csv": lambda path: _read_table(path, ","),
    ".tsv": lambda path: _read_table(path, "\t"),
    ".parquet": pd.read_parquet,
}


def read_rows(path: str) -> list[dict[str, Any]]:
    """Return the rows of a ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` file, in order."""
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
    except Exception as error:  # a damaged .parquet's are of any kind, and of several lines
        words = " ".join(str(error).split()).removesuffix(".")
        raise InputError(
            f"{path}: rows must be .jsonl (a JSON object a line), .csv, .tsv or .parquet. Reading "
            f"it failed: {words}.",
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
        missing = sorted(used_by(template) - row.keys())
        if missing:
            has = f"values in {', '.join(row)}" if row else "no value at all"
            texts = [key for key, value in row.items() if isinstance(value, str) and key != "id"]
            own = "{" + [*texts, "answer"][0] + "}"
            raise InputError(
                f"A row must have a value in the field {missing[0]}. Found {has}. Fill it in, or "
                f"name the rows' own fields in study_arguments, as in text: '{own}'.",
                code="studies.template",
            ) from error
        has = f"with {', '.join(row)}: {str(row)[:80]}"
        raise InputError(
            f"study_arguments: a row must have the fields of the template {template!r}. Found one "
            f"{has}.",
            code="studies.template",
        ) from error

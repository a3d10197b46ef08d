"""Read the user-defined columns of samples, such as the source or the annotator of each sample.

A study's ``train_columns()`` and ``target_columns()`` return a dict or a table of columns, with a
value for each sample in ``train_data()`` or ``target_data()``. If targets are read from a file of
rows, the fields of the rows are the columns.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.data.row_files import RowFile
from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import about_output
from trak_core.runtime.progress import notice
from trak_core.settings import TRAIN
from trak_core.study.dataset_split import users_code
from trak_core.study.read_targets import read_questions
from trak_core.study.study import Study

# Names that user-defined columns must not have, because results have columns with these names.
RESERVED = frozenset({
    *("id", "index", "label", "prediction", "output", "output_sd", "loss_weight", "improves"),
    *("help", "harm", "harmed_label", "self_influence", "rank", "score", "target_id", "train_id"),
    *("sign", "target_text", "target_output", "described_text"),
})
_MOST_BYTES = 255


def columns_of(
    study: Study | None, name: str, ids: Sequence[int | str], question: Path | None = None
) -> pd.DataFrame:
    """Return a table of the user-defined columns, with a row for each sample in ``ids``, in order.

    ``name`` is ``TRAIN`` for the training samples, or the name of an experiment for its targets.
    ``question`` is the file that contains the experiment's targets, or None if the study contains
    them. ``study`` may be None if ``question`` is a file of rows. The dtypes are int64, float64 and
    texts of at most 255 bytes. A column in which a value is missing is converted to texts.
    """
    if question is not None and question.suffix != ".py":
        known, rows = read_questions(question)
        frame = columns_from(rows, study.fields_read if study else ())
    else:
        source = study if question is None else Study.load(question)
        assert source is not None
        pool = "train" if name == TRAIN else "target"
        frame = _study_columns(source, f"{pool}_columns")
        if frame.columns.empty:
            return pd.DataFrame(index=range(len(ids)))
        known = source.ids(pool) if source.has(f"{pool}_ids") else range(len(frame))
        if len(known) != len(frame):
            raise InputError(
                f"{source.path}: {pool}_columns() must return a value for each of the {len(known)} "
                f"samples. Found {len(frame)} values.",
                code="study.columns_length",
            )
    rows = {sample_id: row for row, sample_id in enumerate(known)}
    missing = [i for i in ids if i not in rows]
    if missing:
        raise InputError(
            f"{name}: the columns must have values for all samples that have scores. Found values "
            f"for {len(rows)} samples, but not for sample {missing[0]}. Check whether the data "
            "have changed since the scores were computed.",
            code="study.columns_ids",
        )
    return frame.iloc[[rows[i] for i in ids]].reset_index(drop=True)


def with_class_names(
    rows: pd.DataFrame, columns: Sequence[str], study_file: Path, model_output: str
) -> pd.DataFrame:
    """Return the table ``rows`` with class names in place of class numbers in ``columns``.

    The study in ``study_file`` defines the names. Numbers without a name are kept. If the labels of
    ``model_output`` are not classes, the table is returned unchanged.
    """
    names = Study.load(study_file).class_names()
    is_class = bool(names) and about_output(model_output).labels_are_classes
    return with_names(rows, columns, names) if is_class else rows


def with_names(rows: pd.DataFrame, columns: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """Return the table ``rows`` with the class names ``names`` in place of numbers in ``columns``.

    Columns that the table does not have are ignored. Numbers without a name are kept.
    """
    columns = [column for column in columns if column in rows]
    return rows.assign(**{c: [named(names, n) for n in rows[c].tolist()] for c in columns})


def named(names: Sequence[str], number: Any) -> Any:
    """Return the name of a class, or its number if the class has no name."""
    is_class = isinstance(number, int) and 0 <= number < len(names)
    return names[number] if is_class else number


def columns_from(rows: RowFile, used: Container[str]) -> pd.DataFrame:
    """Return a table of the fields in a file's rows, except those in ``used``.

    The fields in ``used`` are the model's inputs and labels, which are not shown as columns. A
    field that contains long texts or lists is left out, and a notice names it.
    """
    names = dict.fromkeys(name for row in rows for name in row if name not in used)
    columns = short_columns({name: rows.column(name) for name in names})
    left_out = [n for n in names if n != "id" and not {n, f"own_{n}"} & {*columns}]
    if left_out:
        notice(
            f"{rows.path}: the fields {listed(left_out)} do not become columns, because columns "
            f"contain only numbers and texts of at most {_MOST_BYTES} bytes."
        )
    # Without this index, a table without columns would also have no rows.
    return pd.DataFrame(columns, index=range(len(rows)))


def short_columns(columns: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return a table of the columns that contain only numbers and texts of at most 255 bytes.

    A name in ``RESERVED`` gets the prefix ``own_``, and gets it again if the new name is taken.
    """
    kept = {}
    for name, values in columns.items():
        plain = [_plain(value) for value in values]
        is_short = all(
            value is None
            or isinstance(value, int | float)
            or (isinstance(value, str) and len(value.encode(errors="replace")) <= _MOST_BYTES)
            for value in plain
        )
        if is_short and name != "id" and _is_name(name):
            given = name
            while name in RESERVED or (name != given and name in columns):
                name = f"own_{name}"
            kept[name] = _column(plain)
    return pd.DataFrame(kept)


def _study_columns(study: Study, function: str) -> pd.DataFrame:
    if not study.has(function):
        return pd.DataFrame()
    with users_code(f"{study.path}: {function}()"):
        given = study.function(function)()
        columns = {name: list(given[name]) for name in given}
    wrong = [name for name in columns if not _is_name(name) or name in RESERVED]
    if wrong:
        raise InputError(
            f"{study.path}: {function}() must return columns by name. A name must be a printable "
            f"str of at most {_MOST_BYTES} bytes, and must not be one of "
            f"{', '.join(sorted(RESERVED))}. Found the name {wrong[0]!r}.",
            code="study.column_name",
        )
    if len({len(values) for values in columns.values()}) > 1:
        lengths = ", ".join(f"{len(values)} in {name}" for name, values in columns.items())
        raise InputError(
            f"{study.path}: {function}() must return a value for each sample in every "
            f"column. Found different numbers of values: {lengths}.",
            code="study.columns_length",
        )
    made = {name: _column([_plain(value) for value in values]) for name, values in columns.items()}
    for name, values in made.items():
        for text in values if values.dtype == object else ():
            if len(text.encode()) > _MOST_BYTES:
                raise InputError(
                    f"{study.path}: {function}() must return numbers, or texts of at most "
                    f"{_MOST_BYTES} bytes. Found {len(text.encode())} bytes in {name}: "
                    f"{text[:40]!r}. Return longer texts from describe() instead.",
                    code="study.column_text",
                )
    return pd.DataFrame(made)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= _MOST_BYTES


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if value is pd.NaT or value is pd.NA:
        return None
    return None if isinstance(value, float) and value != value else value


def _is_float64(value: float) -> bool:
    return abs(value) <= 2**53 if isinstance(value, int) else abs(value) < float("inf")


def _column(values: Sequence[Any]) -> np.ndarray:
    """Return the values of a column as an array of int64, float64, or texts without line breaks.

    If a column contains both floats and integers, and float64 would round one of the integers, the
    values are converted to texts.
    """
    if all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        return np.array([int(value) for value in values], dtype=np.int64)
    if all(isinstance(value, int | float) and _is_float64(value) for value in values):
        return np.array([float(value) for value in values])
    texts = ["" if value is None else " ".join(str(value).split()) for value in values]
    printable = ["".join(c if c.isprintable() else " " for c in text) for text in texts]
    return np.array([text.encode(errors="replace").decode() for text in printable], dtype=object)

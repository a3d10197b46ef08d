"""Read what a study knows of its samples beside the label: who labelled them, where they are from.

A study's ``train_columns()`` and ``target_columns()`` return columns by name, with a value for each
sample of ``train_data()`` and ``target_data()``. Targets from lines of a file have the fields
of the lines.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import about_output
from trak_core.spec import MEAN_OF, TRAIN
from trak_core.study.dataset_split import checked_ids, users_code
from trak_core.study.read_targets import read_questions
from trak_core.study.study import Study

# Columns that the scores file's tables `train` and `targets`, and answers, have of their own.
RESERVED = frozenset({
    *("id", "index", "label", "prediction", "output", "output_sd", "loss_weight", "improves"),
    *("help", "harm", "harmed_label", "self_influence", "rank", "score", "target_id", "train_id"),
    *("sign", "target_text", "target_output", "described_text", MEAN_OF),
})
_MOST_BYTES = 255


def columns_of(
    study: Study | None, name: str, ids: Sequence[int | str], question: Path | None = None
) -> pd.DataFrame:
    """Return the study's own columns of its training samples, or of an experiment's targets.

    There is a row a sample, in the order of ``ids``. A column is int64, float64 or texts of at most
    255 bytes; one in which a value is missing is texts. No columns, where nothing is known. The
    study is None where ``question``, the experiment's own file of targets, has lines.
    """
    if question is not None and question.suffix != ".py":
        known, rows = read_questions(question)
        columns = {name: rows.column(name) for name in rows[0]}
        # Rows stay where no field is short.
        frame = pd.DataFrame(short_columns(columns), index=range(len(rows)))
    else:
        asked = study if question is None else Study.load(question)
        assert asked is not None
        pool = "train" if name == TRAIN else "target"
        frame = _called(asked, f"{pool}_columns")
        if frame.columns.empty:
            return pd.DataFrame(index=range(len(ids)))
        # The ids of all samples, without reading the samples.
        known: Sequence[Any] = range(len(frame))
        if asked.has(f"{pool}_ids"):
            with users_code(f"{asked.path}: {pool}_ids(), which gives one id a sample,"):
                known = list(asked.function(f"{pool}_ids")())
            known = checked_ids(known, len(known), f"{asked.path}: {pool}_ids()")
        if len(known) != len(frame):
            raise InputError(
                f"{asked.path}: {pool}_columns() must have a value for each of the {len(known)} "
                f"samples. Found {len(frame)}.",
                code="study.columns_length",
            )
    rows = {sample_id: row for row, sample_id in enumerate(known)}
    missing = [i for i in ids if i not in rows]
    if missing:
        raise InputError(
            f"{name}: there must be columns of all samples that have scores. Found none of "
            f"{missing[0]}, and {len(rows)} others. Has the data changed since?",
            code="study.columns_ids",
        )
    return frame.iloc[[rows[i] for i in ids]].reset_index(drop=True)


def with_class_names(
    rows: pd.DataFrame, columns: Sequence[str], study_file: Path, model_output: str
) -> pd.DataFrame:
    """Return rows with the study's names of classes in place of their numbers in some columns.

    A number without a name stays, and all do where labels are no classes.
    """
    names = Study.load(study_file).class_names()
    if not names or not about_output(model_output).labels_are_classes:
        return rows
    known = dict(enumerate(names))
    return rows.assign(**{
        column: [known.get(value, value) for value in rows[column].tolist()]
        for column in columns
        if column in rows
    })


def short_columns(columns: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return the columns that say something short: no text above 255 bytes, no lists or objects.

    Names that the tables have of their own get ``own_`` before them.
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
            kept[f"own_{name}" if name in RESERVED else name] = _column(plain)
    return pd.DataFrame(kept)


def _called(study: Study, function: str) -> pd.DataFrame:
    """Return what the study's function gives, checked; nothing, if it has none."""
    if not study.has(function):
        return pd.DataFrame()
    with users_code(f"{study.path}: {function}()"):
        given = study.function(function)()
        columns = {name: list(given[name]) for name in given}
    wrong = [name for name in columns if not _is_name(name) or name in RESERVED]
    if wrong:
        raise InputError(
            f"{study.path}: {function}() must return columns by name, a text that is none of "
            f"{', '.join(sorted(RESERVED))}. Found {wrong[0]!r}.",
            code="study.column_name",
        )
    if len({len(values) for values in columns.values()}) > 1:
        lengths = ", ".join(f"{len(values)} of {name}" for name, values in columns.items())
        raise InputError(
            f"{study.path}: {function}() must return as many values of each column. Found "
            f"{lengths}.",
            code="study.columns_length",
        )
    made = {name: _column([_plain(value) for value in values]) for name, values in columns.items()}
    for name, values in made.items():
        for text in values if values.dtype == object else ():
            if len(text.encode()) > _MOST_BYTES:
                raise InputError(
                    f"{study.path}: {function}() must return numbers, or texts of at most "
                    f"{_MOST_BYTES} bytes. Found {len(text.encode())} bytes in {name}: "
                    f"{text[:40]!r}. What is longer belongs into describe().",
                    code="study.column_text",
                )
    return pd.DataFrame(made)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= _MOST_BYTES


def _plain(value: Any) -> Any:
    """Return a number or text as Python has it; None for what is missing."""
    value = value.item() if hasattr(value, "item") else value
    if value is pd.NaT or value is pd.NA:
        return None
    return None if isinstance(value, float) and value != value else value


def _column(values: Sequence[Any]) -> np.ndarray:
    """Return a column of whole numbers, of numbers, or of texts in one line."""
    if all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        return np.array([int(value) for value in values], dtype=np.int64)
    if all(isinstance(value, int | float) and abs(value) < float("inf") for value in values):
        return np.array([float(value) for value in values])
    texts = ["" if value is None else " ".join(str(value).split()) for value in values]
    printable = ["".join(c if c.isprintable() else " " for c in text) for text in texts]
    return np.array([text.encode(errors="replace").decode() for text in printable], dtype=object)

"""Define the study of a model that predicts a class or a number from numeric columns of a table."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trak_core.data.row_files import RowSample, RowSamples, as_number, read_rows, shortened
from trak_core.errors import InputError, listed
from trak_core.ready_made.ready_study import (
    UNKNOWN_LABEL,
    ReadyStudy,
    class_numbers,
    encoder,
    field,
    function_at,
    notice,
)
from trak_core.study.sample_columns import columns_from

# `_POINTED` matches a number such as 12.345, whose point may separate thousands. `_PLAIN` matches a
# number below 1000, which has no such point.
_POINTED, _PLAIN = re.compile(r"[+-]?[1-9][0-9]{0,2}\.[0-9]{3}"), re.compile(r"[+-]?[0-9]{1,3}")


def tabular(
    table: str,
    label: str,
    model: str,
    targets: str | None = None,
    columns: Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    scale: str | None = None,
) -> ReadyStudy:
    """Return the study of a model that was trained on the rows of a table.

    Args:
        table: The file with the training rows, or the folder of a saved ``datasets.Dataset``.
        label: The column to predict.
        model: ``file.py:function``, where the function takes no arguments and returns the module.
            Checkpoints replace the module's weights.
        targets: A table of the rows to explain. The default is the training rows.
        columns: The columns that the model takes as inputs, in the model's order. They must contain
            the numbers on which the model was trained. The default is all columns except ``label``
            and ``id``.
        classes: Labels in the order of the model's logits, if labels are names. By default, labels
            are numbers: integers if all training labels are integers, else floats.
        scale: ``standard`` subtracts from each input its mean over the training rows, and divides
            by its standard deviation, as scikit-learn's ``StandardScaler`` does. A deviation of 0
            is replaced by 1. Pages show the inputs before scaling. By default, inputs are not
            scaled.
    """
    if scale not in {None, "standard"}:
        raise InputError(
            f"study_arguments: scale must be standard or omitted. Found {scale!r}. For any other "
            "scaling, write the scaled numbers into the table.",
            code="studies.scale",
        )
    rows = read_rows(table)
    target_rows = read_rows(targets) if targets else rows
    names = list(columns or [name for name in rows[0] if name not in {label, "id"}])
    if repeated := {name for name in names if names.count(name) > 1}:
        raise InputError(
            "study_arguments: columns must list each input once. Found twice: "
            f"{listed(sorted(repeated))}.",
            code="studies.columns",
        )
    for name in names:
        _notice_thousands(name, [row.get(name) for row in rows])
    numbers = class_numbers(classes or ())
    labels = [as_number(row.get(label)) for row in rows]
    are_whole = all(isinstance(value, int) for value in labels)
    is_class = bool(classes) or are_whole

    def number(row: Mapping[str, Any], column: str) -> int | float:
        value = as_number(field(row, column, UNKNOWN_LABEL if is_class and column == label else ""))
        if value is None:
            raise InputError(
                f"{column} must be a number. Found {shortened({column: row[column]})}. Write the "
                "number as in training, with a decimal point and without thousands separators, or "
                "delete the row if training left it out. If this column is not an input, list the "
                "inputs in `columns` of study_arguments. If labels are names, list them in "
                "`classes`.",
                code="studies.numbers",
            )
        return value

    def measured(row: Mapping[str, Any]) -> tuple[Tensor, int | float]:
        values = [float(number(row, name)) for name in names]
        if not classes:
            answer = number(row, label)
            return torch.tensor(values, dtype=torch.float64), answer if are_whole else float(answer)
        if str(field(row, label, UNKNOWN_LABEL)) not in numbers:
            are_read = any(isinstance(name, bool) for name in classes)
            booleans = " YAML reads yes and no as booleans, unless in quotes." if are_read else ""
            unknown = "" if str(row[label]).strip() else f" {UNKNOWN_LABEL}"
            raise InputError(
                f"{label} must be one of the classes {listed([*numbers])}, with the same spelling. "
                f"Found {shortened({label: row[label]})}. Correct the row, or `classes` in "
                f"study_arguments.{booleans}{unknown}",
                code="studies.numbers",
            )
        return torch.tensor(values, dtype=torch.float64), numbers[str(row[label])]

    means, deviations = torch.zeros(len(names)), torch.ones(len(names))
    if scale:
        inputs = torch.stack([values for values, _ in RowSamples(rows, measured)])
        deviations, means = torch.std_mean(inputs, dim=0, correction=0)
        # The deviation of a column of equal numbers can be slightly above 0, because their mean is
        # rounded. Inputs must not be divided by such a deviation.
        is_constant = deviations <= len(rows) * torch.finfo(torch.float64).eps * means.abs()
        deviations.masked_fill_(is_constant, 1.0)

    outside: set[str] = set()

    @cache
    def ends(name: str) -> tuple[float, float]:
        values = [float(number(row, name)) for row in rows]
        return min(values), max(values)

    def asked(row: Mapping[str, Any]) -> RowSample:
        made = sample(row)
        for name in (name for name in names if name not in outside):
            low, high = ends(name)
            if not low <= float(number(row, name)) <= high:
                outside.add(name)
                notice(
                    f"{name} {row[name]} is outside of the range of the training rows, {low:g} to "
                    f"{high:g}. Further such values in this column are not reported."
                )
        return made

    def sample(row: Mapping[str, Any]) -> RowSample:
        values, answer = measured(row)
        return RowSample.of(row, (((values - means) / deviations).float(), torch.tensor(answer)))

    def describe(sample: tuple[Tensor, Tensor]) -> str:
        if not isinstance(sample, RowSample):
            return as_read(sample)
        # Rows without a field id have the ids 0, 1, ... Such a row is easier to find by its line.
        place = "" if "id" in sample.row or not sample.place else f"{sample.place}: "
        return place + ", ".join(f"{name} {sample.row[name]}" for name in names)

    def as_read(sample: tuple[Tensor, Tensor]) -> str:
        values = zip(names, sample[0].tolist(), strict=True)
        inputs = ", ".join(f"{name} {value:.6g}" for name, value in values)
        number = sample[1].item()
        name = f"{[*numbers][int(number)]!r}, class " if classes else ""
        return f"{inputs}; {label} {name}{number:.6g}"

    used = {label, *names}
    return ReadyStudy(
        to_change_samples=(
            f"The network gets {len(names)} numbers from each row: {listed(names)}. To change "
            "them, list the columns in the network's order in `columns` of study_arguments."
        ),
        make_model=lambda: function_at(model, "model")(),
        train_data=lambda: RowSamples(rows, sample),
        train_ids=rows.ids,
        target_data=lambda: RowSamples(target_rows, sample),
        target_ids=target_rows.ids,
        encode=encoder(asked, rows[0], (*names, label), label if is_class else None),
        describe=describe,
        as_read=as_read,
        class_names=(lambda: [str(name) for name in classes]) if classes else None,
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows, used),
        fields_read=used,
    )


def _notice_thousands(name: str, cells: Sequence[Any]) -> None:
    """Print a notice if points in a column of a text file could separate thousands."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    pointed = [cell for cell in texts if "." in cell]
    plain = [cell for cell in texts if "." not in cell]
    if (
        pointed
        and plain
        and all(map(_POINTED.fullmatch, pointed))
        and all(map(_PLAIN.fullmatch, plain))
    ):
        notice(
            f"in the column {name}, points are read as decimal points: {pointed[0]} is "
            f"{float(pointed[0]):g}. If they separate thousands, remove them from the table."
        )

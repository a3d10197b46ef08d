"""Descriptions of targets, beside pandas' own queries."""

import random

import numpy as np
import pandas as pd
import pytest
from refused import refused

from trak_core.errors import InputError
from trak_core.settings.target_filter import Condition

NUMBERS, TEXTS = ("label", "prediction", "output"), ("annotator", "id")
CONSTANTS = {"label": "3", "prediction": "-1", "output": "0.25"}


@pytest.fixture
def table():
    draw = np.random.default_rng(0)
    return pd.DataFrame({
        "id": [f"t{i % 7}" for i in range(60)],
        "label": draw.integers(-2, 5, 60),
        "prediction": draw.integers(-2, 5, 60),
        "output": draw.standard_normal(60).astype(np.float32),
        "annotator": draw.choice(["anna", "bert", ""], 60).astype(object),
    })


def expression(draw, depth):
    """A random description that pandas reads too."""
    if depth:
        both = [expression(draw, depth - 1) for _ in range(2)]
        return draw.choice([
            *(f"({both[0]}) and ({both[1]})", f"({both[0]}) or ({both[1]})", f"not ({both[0]})")
        ])
    how = draw.choice(["==", "!=", "<", "<=", ">", ">="])
    name = draw.choice(NUMBERS)
    return draw.choice([
        f"{name} {how} {CONSTANTS[name]}",
        f"{name} {how} {draw.choice(NUMBERS)}",
        f"-1 <= {name} < 2",
        f"label {draw.choice(['in', 'not in'])} [1, 2, 4]",
        f"annotator {draw.choice(['in', 'not in'])} ['anna', '']",
        f"annotator {how} 'bert'",
        f"{draw.choice(TEXTS)} {how} {draw.choice(TEXTS)}",
    ])


@pytest.mark.parametrize("seed", range(60))
def test_what_holds_is_what_pandas_finds(table, seed):
    text = expression(random.Random(seed), seed % 4)
    held = Condition.parse(text).holds({name: np.asarray(table[name]) for name in table})
    assert held.dtype == bool
    assert table[held].index.tolist() == table.query(text, engine="python").index.tolist(), text


@pytest.mark.parametrize(
    "text",
    [
        *("label", "label ==", "label = 3", "3 == 3", "label == [3]", "label in 3", "label in []"),
        *("label is 3", "label + 1 == 3", "(label == 3) & (output < 0)", "label == None"),
        *("label == True", "__import__('os').system('x') == 0", "label.real == 3", "label[0] == 3"),
        *("f'{label}' == 'x'", "(lambda: 1)() == label", "label == 3 if label else label == 2"),
        *("not label", "label == 3; output", "label == b'3'", "label == 3j", "(label := 3) == 3"),
        *("@label == 3", "label == 3\nlabel == 4", "~(label == 3)", "[x for x in label] == 1"),
        "\0",
        "(" * 300 + "label == 3" + ")" * 300,
        "label == 3 or " * 100 + "label == 3",
    ],
)
def test_what_is_no_comparison_is_refused(text):
    with pytest.raises(InputError) as refusal:
        Condition.parse(text)
    assert refusal.value.code == "spec.condition"
    assert "\0" not in str(refusal.value)


def test_columns_that_are_not_there_or_of_another_kind(table):
    condition = Condition.parse("speaker == anna or label > 2")
    assert condition.columns == ["anna", "label", "speaker"]
    with refused("spec.condition_column", "anna", "annotator"):
        condition.check_columns(["annotator"])
    columns = {name: np.asarray(table[name]) for name in table}
    for text in ("annotator < 3", "label in [1, 'one']", "id == label"):
        with pytest.raises(InputError, match="texts with texts"):
            Condition.parse(text).holds(columns)
    with refused("spec.condition", "output.max() > 2"):
        Condition.parse("label == 3 and output.max() > 2")
    with refused("spec.condition_kinds", "label == 'three'"):
        Condition.parse("label == 'three'").holds(columns)

"""A study's own columns: from its functions, and from the fields of lines."""

import json
from pathlib import Path

import pytest
from refused import refused

from trak_core.data.rows import RowFile
from trak_core.ready_made.ready_study import used_by
from trak_core.study.read_targets import encoded_line
from trak_core.study.sample_columns import columns_from, columns_of
from trak_core.study.study import Study

STUDY = """
def target_ids():
    return ["a", "b", "c"]


def target_columns():
    return {columns}
"""


def study(tmp_path, columns):
    path = tmp_path / "study.py"
    path.write_text("import numpy as np\nimport pandas as pd\n" + STUDY.format(columns=columns))
    return Study.load(path)


def test_columns_come_in_the_order_of_the_ids(tmp_path):
    given = """pd.DataFrame({
        "annotator": ["anna", None, "  bert\\nb. "], "seconds": [1.5, 2.0, 3.0],
        "pages": np.array([1, 2, 3], dtype=np.uint8), "checked": [True, False, True],
        "price": [1.0, float("nan"), 2.5], "day": pd.to_datetime(["2026-01-01"] * 3),
    })"""
    columns = columns_of(study(tmp_path, given), "mine", ["c", "a"])
    assert columns.to_dict("list") == {
        "annotator": ["bert b.", "anna"],
        "seconds": [3.0, 1.5],
        "pages": [3, 1],
        "checked": [1, 1],
        "price": ["2.5", "1.0"],  # a number is missing
        "day": ["2026-01-01 00:00:00"] * 2,
    }
    assert columns.index.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "code", "values"),
    [
        ("{'label': [1, 2, 3]}", "study.column_name", ["label"]),
        ("{'sign': [1, 2, 3]}", "study.column_name", ["sign"]),
        ("{3: [1, 2, 3]}", "study.column_name", ["3"]),
        ("{'a': [1, 2]}", "study.columns_length", ["2"]),
        ("{'a': [1, 2, 3], 'b': [1]}", "study.columns_length", ["3 of a", "1 of b"]),
        ("{'a': ['x' * 300] * 3}", "study.column_text", ["300"]),
        ("{'a': [1, 2, 3]}", "study.columns_ids", ["d"]),
    ],
)
def test_what_is_no_column_is_refused(tmp_path, columns, code, values):
    with refused(code, *values):
        columns_of(study(tmp_path, columns), "mine", ["a", "d"])


def test_lines_have_their_short_fields(tmp_path):
    lines = [
        {"id": "q1", "text": "t" * 300, "source": "manual", "label": 2, "tags": ["a"]},
        {"id": "q0", "text": "t", "source": "talk", "label": 3, "tags": []},
    ]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    columns = columns_of(None, "mine", ["q0", "q1"], path)
    assert columns.to_dict("list") == {"source": ["talk", "manual"], "own_label": [3, 2]}


def test_rows_have_what_the_model_does_not_get():
    assert used_by("{prompt}: {answer[0]}", None, "plain") == {"prompt", "answer"}
    rows = [{"id": 1, "prompt": "p", "who": "anna"}, {"id": 2, "prompt": "q", "page": 3}]
    file = RowFile(Path("rows.jsonl"), rows, (1, 2))
    assert columns_from(file, {"prompt"}).to_dict("list") == {
        "who": ["anna", ""],
        "page": ["", "3"],
    }


def test_a_ready_made_study_s_fields_are_no_columns(tmp_path):
    """Rows of an experiment's ``data``, and lines, have the columns of training samples."""
    (tmp_path / "train.csv").write_text("id,a,kind,who,day\nr,1.5,yes,anna,3\ns,2.5,no,bert,4\n")
    called = f"tabular({str(tmp_path / 'train.csv')!r}, 'kind', 'n.py:n', columns=['a'], "
    (tmp_path / "study.py").write_text(
        f"from trak_core.ready_made.tabular import tabular\nstudy = {called}classes=['no', 'yes'])"
        "\nencode, train_columns = study.encode, study.train_columns\n"
    )
    made = Study.load(tmp_path / "study.py")
    known = {"who": ["anna"], "day": [3]}
    assert made.function("train_columns")()[:1].to_dict("list") == known
    for asked, line in (("asked.csv", "a,kind,who,day\n1.5,yes,anna,3"), ("asked.jsonl", None)):
        row = {"a": 1.5, "kind": "yes", "who": "anna", "day": 3}
        (tmp_path / asked).write_text(line or json.dumps(row))
        assert columns_of(made, "mine", [0], tmp_path / asked).to_dict("list") == known
    _, sample, fields = encoded_line(made, json.dumps(row), 0)
    assert (sample[0].tolist(), int(sample[1])) == ([1.5], 1)
    assert fields == {"who": "anna", "day": 3}

"""Files of rows: text stays as written, numbers are made where needed, fields become columns."""

import csv
import gzip
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from few_words import write as lines
from refused import refused

from trak_core.data.row_files import RowFile, as_number, class_number, parsed_json, read_rows
from trak_core.errors import InputError
from trak_core.ready_made.ready_study import filled_in, used_by
from trak_core.study.dataset_split import checked_ids
from trak_core.study.read_targets import encoded_line, read_questions
from trak_core.study.sample_columns import columns_from, columns_of
from trak_core.study.study import Study

# What type guessing changes: zeros, decimals, exponents, truths, missing values, dates, spaces.
AS_WRITTEN = [
    *("007", "1.10", "12", "1.5", "1e3", "-0", "+1", "0x10", "1_000", "TRUE", "False", "yes", "no"),
    *("nan", "NA", "null", "None", "", " x ", "2024-01-02", "1,234", "1;2", 'say "a"'),
    *("two\nlines", "two\r\nlines", "a\rb"),
    *("\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{ARABIC-INDIC DIGIT THREE}", "x" * 200_000),
]


def table(path, rows):
    """Write rows by pandas, with quotes around each cell: it would leave them out around CR."""
    separator = "\t" if path.suffix == ".tsv" else ","
    pd.DataFrame(rows).to_csv(path, index=False, sep=separator, quoting=csv.QUOTE_ALL)
    return path


def parquet(path, rows, **of_frame):
    pytest.importorskip("pyarrow", reason="with the extra `test`")
    pd.DataFrame(rows, **of_frame).to_parquet(path)
    return path


def json_list(path, rows):
    path.write_text(json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def test_text_stays_as_written_in_every_use(tmp_path, suffix):
    """As a row, as a question and in a template: a column of texts with any other text in it."""
    write = {".jsonl": lines, ".json": json_list, ".parquet": parquet}.get(suffix, table)
    for other in ("1.5", "7", "text"):
        rows = [{"answer": text, "other": other} for text in AS_WRITTEN]
        file = write(tmp_path / f"rows{suffix}", rows)
        assert [row["answer"] for row in read_rows(file)] == AS_WRITTEN
        assert [row["answer"] for row in read_questions(file)[1]] == AS_WRITTEN
        assert [filled_in("{answer}", row) for row in read_rows(file)] == AS_WRITTEN


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv"])
def test_unicode_s_separators_end_no_line(tmp_path, suffix):
    path, text = tmp_path / f"rows{suffix}", "one\u2028line, \u0085 too"
    path.write_text(f'{{"text": "{text}"}}\n' if suffix == ".jsonl" else f'text\n"{text}"\n')
    assert [row["text"] for row in read_rows(path)] == [text]
    assert [row["text"] for row in read_questions(path)[1]] == [text]


@pytest.mark.parametrize(
    "text", ["1.10", "1.0", "12", "-0.0", "1e3", "1E-07", "0.30000000000000001"]
)
def test_a_number_in_json_is_written_as_the_file_has_it(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(f'{{"x": {text}, "y": [{text}]}}\n')
    (row,) = read_rows(tmp_path / "a.jsonl")
    assert filled_in("{x}|{y[0]}", row) == f"{text}|{text}"
    assert row["x"] == json.loads(text) == as_number(row["x"])
    assert json.loads(json.dumps(row)) == {"x": json.loads(text), "y": [json.loads(text)]}


@pytest.mark.parametrize(
    "value", [[1, 2], {"role": "user"}, True, [{"role": "x", "content": "y"}], ["a"], {}, False]
)
def test_what_is_no_text_and_no_number_is_not_written_into_a_text(value):
    for template in ("{answer}", "{id}: {answer}", "{answer!s}"):
        with refused("studies.value", type(value).__name__, "answer"):
            filled_in(template, {"id": 3, "answer": value})


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["12", "-3", "0"], [12, -3, 0]),
        (["1.5", "2", "-0.25"], [1.5, 2.0, -0.25]),
        *((cells, cells) for cells in (["007", "12"], ["1.10", "1.1"], ["1e3"], ["1", ""], ["-0"])),
        *((cells, cells) for cells in (["True"], ["9" * 30], ["1", "x"], ["nan"], ["inf"], [" 1"])),
    ],
)
def test_a_table_s_columns_are_numbers_where_nothing_is_lost(tmp_path, cells, numbers):
    file = table(tmp_path / "a.csv", {"value": cells, "last": "x"})
    kept = read_rows(file).column("value")
    assert kept == numbers
    assert [type(value) for value in kept] == [type(value) for value in numbers]
    assert [str(value) for value in kept] == cells or type(kept[0]) is float
    shown = [value.strip() if isinstance(value, str) else value for value in kept]
    assert columns_from(read_rows(file), set())["value"].tolist() == shown
    written = lines(tmp_path / "a.jsonl", [{"value": cell} for cell in cells])
    assert read_rows(written).column("value") == cells


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((text, float(text)) for text in ("1.5", "-2", "+.5", "3.", "1e3", " 7 ", "1E-3")),
        *((value, value) for value in (3, -1.5)),
        *((value, 1) for value in (True, "true", "TRUE", "True")),
        *((value, None) for value in ("1,234", "1.234,5", "1_000", "0x10", "nan", "inf", "", "x")),
        *((value, None) for value in (None, [1], float("nan"), float("inf"), "1e999", "1 000")),
        *((value, None) for value in ("9" * 400, 10**400)),
        (10**20, 1e20),
        (str(10**20), 1e20),
    ],
)
def test_a_number_is_made_of_what_can_say_one_alone(value, number):
    assert as_number(value) == number


@pytest.mark.parametrize("value", ["01", "-1", "1.0", "+1", " 1", "", "one", True, 1.0, None, [1]])
def test_the_number_of_a_class_is_an_integer_written_as_one(value):
    assert class_number(value) is None
    assert [class_number(text) for text in ("0", "12", 3)] == [0, 12, 3]


IDS = [
    *((["3", "10", "17"], [3, 10, 17]), (["-5", "0"], [-5, 0])),
    *((ids, ids) for ids in (["007", "008"], ["1.10", "1.1"], ["3", "10a"], ["1e5", "2"])),
    *((ids, ids) for ids in (["TRUE", "FALSE"], ["9" * 19, "1"])),
]


@pytest.mark.parametrize(("cells", "ids"), IDS)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_ids_of_a_table_are_integers_only_where_each_is_written_as_one(
    tmp_path, cells, ids, suffix
):
    file = table(tmp_path / f"rows{suffix}", {"id": cells, "text": "x"})
    assert read_rows(file).ids() == ids == read_questions(file)[0]


@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("own", [None, "missing", ""])
def test_a_row_without_an_id_among_others_is_named(tmp_path, place, own):
    """Ids by number would stand for other rows than the file's do."""
    rows = [{"id": str(10 * i + 3), "text": "x"} for i in range(6)]
    rows[place]["id"] = own
    if own == "missing":
        del rows[place]["id"]
    file = lines(tmp_path / "rows.jsonl", rows)
    with refused("data.mixed_ids", f"{file}, line {place + 1}"):
        read_rows(file).ids()


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        *((ids, "data.mixed_ids") for ids in ([1, "2"], ["1", 2], [1, 2.0], [1, True], [1.5, 2.5])),
        *((ids, "data.mixed_ids") for ids in ([[1], [2]], [True, False], [1, {"a": 1}])),
        *((ids, "data.repeated_id") for ids in ([1, 1], ["a", "b", "a"], [5, 3, 3])),
    ],
)
def test_ids_of_other_types_and_repeated_ones_are_named(tmp_path, ids, code):
    file = lines(tmp_path / "rows.jsonl", [{"id": own} for own in ids])
    with refused(code, re.compile(rf"{file}, line \d")):
        read_rows(file).ids()


def test_an_id_that_pandas_reads_as_missing_is_refused():
    """Others that it takes for missing in files of text keep their names in HDF5."""
    names = ["NaN", "NA", "null", "None", "-", "Nan", "inf"]
    assert checked_ids(names, 7, "ids()") == names
    with pytest.raises(InputError, match="Found 'nan'"):
        checked_ids([*names, "nan"], 8, "ids()")


def test_parquet_keeps_types_and_has_no_index(tmp_path):
    """Integers stay integers in a column with missing values; an index of pandas is no field."""
    columns = {"id": [3, 10], "label": pd.array([1, None], dtype="Int64"), "x": [0.5, 2]}
    columns |= {"messages": [[{"role": "user", "content": "x"}], None], "b": [True, False]}
    for index in (["r1", "r2"], pd.Index([7, 8], name="row"), pd.Index([7, 8], name="x y")):
        rows = read_rows(parquet(tmp_path / "a.parquet", columns, index=index))
        assert list(rows[0]) == list(columns)
        assert rows.ids() == rows.column("id") == [3, 10]
        assert rows.column("label") == [1, None]
        assert type(rows[0]["label"]) is int
        assert [row["messages"] for row in rows] == columns["messages"]
        assert rows.place(1) == f"{tmp_path}/a.parquet, row 2"
    named = parquet(tmp_path / "b.parquet", {"x": [1, 2]}, index=pd.Index([7, 8], name="id"))
    assert read_rows(named).ids() == [7, 8]
    broken = parquet(tmp_path / "d.parquet", {"id": pd.array([3, None], dtype="Int64")})
    with refused("data.mixed_ids", f"{broken}, row 2"):
        read_rows(broken).ids()


def test_rows_without_ids_are_numbered(tmp_path):
    for row in ({"a": 1}, {"id": None, "a": 1}):
        assert read_rows(lines(tmp_path / "a.jsonl", [row] * 3)).ids() == [0, 1, 2]


def test_a_row_s_place_is_its_line(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n\n1,"2\n3"\n4,5\n')
    rows = read_rows(tmp_path / "a.csv")
    assert [rows.place(i) for i in (0, 1)] == [f"{tmp_path}/a.csv, line {n}" for n in (3, 5)]
    (tmp_path / "a.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}\n')
    rows = read_rows(tmp_path / "a.jsonl")
    assert [rows.place(i) for i in (0, 1)] == [f"{tmp_path}/a.jsonl, line {n}" for n in (2, 4)]


def test_json_lists_and_json_lines(tmp_path):
    """Programs write either of them into files that end in .json. Errors name the line or row."""
    file = tmp_path / "a.json"
    for text in ('[{"a": 1},\n{"a": 2}]', '\ufeff [\n{"a": 1},{"a": 2}]', '{"a": 1}\n{"a": 2}\n'):
        file.write_text(text, "utf-8")
        rows = read_rows(file)
        assert (list(rows), rows.place(1)) == ([{"a": 1}, {"a": 2}], f"{file}, row 2")
    file.write_text('[{"a": 1},\n{"a": 2}\n{"a": 3}]')
    with refused("data.rows", "Expecting ',' delimiter in line 3, in '{\"a\": 3}]'"):
        read_rows(file)
    file.write_text('[{"a": 1}, 3]')
    with refused("data.rows", "row 2 is not a JSON object"):
        read_rows(file)


NO_ROWS = {"a.txt": "x", "b.jsonl": "{", "c.jsonl": "", "d.jsonl": "3"}
NO_ROWS |= {"a.json": '{"a": [1],', "b.json": "[]", "c.json": "[{},\n3]"}


def test_compressed_rows_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"a": 1}'))
    with refused("data.rows", "gzip"):
        read_rows(tmp_path / "a.jsonl")


def test_files_that_hold_no_rows(tmp_path):
    for name, text in NO_ROWS.items():
        (tmp_path / name).write_text(text)
        with refused("data.rows", tmp_path / name):
            read_rows(str(tmp_path / name))
    with refused("data.missing_rows", "no.csv"):
        read_rows("no.csv")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    # The words of pyarrow, or of Python where there is none, are in one line.
    words = re.compile(r"(?<=Reading it failed: )[^\n]+(?=\.$)")
    with refused("data.rows", tmp_path / "a.parquet", words):
        read_rows(tmp_path / "a.parquet")
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes('"a"\n"größer"\n'.encode("latin-1"))
        with refused("data.rows", tmp_path / name, "line 2 is not in UTF-8", "Save the file as"):
            read_rows(tmp_path / name)


def test_rows_of_a_table_have_the_cells_of_its_header(tmp_path):
    tables = {
        # pandas takes the first of three cells for a row's name, if all rows have three.
        "a,b\n1,2,3\n4,5,6\n": "line 2 has 3 cells, but the header has 2",
        # And fills in what a row lacks.
        "a,b\n1,2\n3\n": "line 3 has 1 cell, but the header has 2",
        'a,b\n1,"2\n3"\n\n4,5,6\n': "line 5 has 3 cells, but the header has 2",
        'a,b\n1,2\n"3,4\n': "line 3 begins a row with wrong quotes: unexpected end of data",
        "a,b,a\n1,2,3\n": "the field 'a' occurs twice",
        ",,\n1,2,3\n": "it has no rows",
        **{f"a{sign}b\n1{sign}2\n": "separated by ','" for sign in ";\t|"},
    }
    for text, words in tables.items():
        (tmp_path / "a.csv").write_text(text)
        with refused("data.rows", tmp_path / "a.csv", re.compile(words)):
            read_rows(tmp_path / "a.csv")
        if "," in text:
            (tmp_path / "a.tsv").write_text(text.replace(",", "\t"))
            with refused("data.rows", tmp_path / "a.tsv", re.compile(words)):
                read_rows(tmp_path / "a.tsv")
    # As some programs end lines, and spreadsheets.
    for text in ("a,b\n1,2,\n3,4,\n", "a,b,,\n1,2,,\n3,4,,\n"):
        (tmp_path / "a.csv").write_text(text)
        assert list(read_rows(tmp_path / "a.csv")) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_a_line_that_is_no_object_of_json_is_named(tmp_path):
    lines_with = {
        '{"a": 1, "b": 2, "a": 3}': "the field 'a' occurs twice",
        '{"a": NaN}': "NaN is not a finite number",
        '{"a": -Infinity}': "-Infinity is not a finite number",
        '{"a": 1e999}': "1e999 is not a finite number",
        '{"a": "\\ud83d"}': "half of a surrogate pair, which is not valid text",
        '{"a": ' + "[" * 10**5: "it is nested too deeply",
        f'{{"a": {"1" * 5000}}}': "Exceeds the limit (4300 digits) for integer string conversion",
    }
    for line, reason in lines_with.items():
        (tmp_path / "a.jsonl").write_text(f'{{"a": "\\ud83d\\ude00"}}\n\n{line}\n')
        words = f"line 3: {reason}, in {line[:80]!r}"
        with refused("data.rows", tmp_path / "a.jsonl", re.compile(re.escape(words))):
            read_rows(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude00", "b": {"c": [1.5]}}\n')
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"a": "\U0001f600", "b": {"c": [1.5]}}]
    assert parsed_json('{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("second", ['{"a": 1}', '{"a": 1, "b": null}', '{"a": 1, "c": 2}'])
def test_questions_have_the_same_fields(tmp_path, second):
    (tmp_path / "asked.jsonl").write_text(f'{{"a": 1, "b": 2}}\n{second}\n')
    with refused("data.fields", f"{tmp_path}/asked.jsonl, line 2"):
        read_questions(tmp_path / "asked.jsonl")


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
        ("{'a': [1, 2, 3], 'b': [1]}", "study.columns_length", ["3 in a", "1 in b"]),
        ("{'a': ['x' * 300] * 3}", "study.column_text", ["300"]),
        ("{'a': [1, 2, 3]}", "study.columns_ids", ["d"]),
    ],
)
def test_what_is_no_column_is_refused(tmp_path, columns, code, values):
    with refused(code, *values):
        columns_of(study(tmp_path, columns), "mine", ["a", "d"])


def test_lines_have_their_short_fields(tmp_path, capsys):
    lines = [
        {"id": "q1", "text": "t" * 300, "source": "manual", "label": 2, "tags": ["a"]},
        {"id": "q0", "text": "t", "source": "talk", "label": 3, "tags": []},
    ]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    columns = columns_of(None, "mine", ["q0", "q1"], path)
    assert columns.to_dict("list") == {"source": ["talk", "manual"], "own_label": [3, 2]}
    told = capsys.readouterr().out
    assert told.startswith(f"Notice: {path}: the fields text, tags do not become columns")
    columns_of(None, "mine", ["q0", "q1"], path)
    assert not capsys.readouterr().out


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

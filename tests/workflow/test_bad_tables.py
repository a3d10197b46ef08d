"""A bad table of checkpoints or targets stops before any job, with one message."""

import re

import pytest
from refusals import check, message, refuse
from refused import refused

from trak_core.config.checkpoint_list import checkpoint_table

HEADER = b"checkpoint\tpath\n"
COLUMNS = r"columns checkpoint, path, each once\. Missing:"
TEXT = r"the table must be tab-separated text in UTF-8\."
GONE = r"Checkpoints must exist\. Found nothing at:"
TABLES = {
    "a table without rows": (HEADER, r"must have rows\. Found only a header"),
    "a table with commas": (
        b"checkpoint,path\nc0,c0.pt\n",
        r"must be tab-separated, .* Missing: checkpoint, path\. Found checkpoint,path",
    ),
    "a table that is not UTF-8": (
        HEADER + b"c0\tcaf\xe9.pt\n",
        rf"{TEXT} .* failed: 'utf-8' codec",
    ),
    "a quote without an end": (HEADER + b'c0\t"c0.pt\nc1\tc0.pt\n', rf"{TEXT} .* unexpected end"),
    "a row without a path": (
        HEADER + b"c0\n",
        r"columns checkpoint, path\. Found 'c0', '' in line 2",
    ),
    "more cells than the header": (
        HEADER + b"c0\tc0.pt\t\nc1\tc1.pt\trun1\n",
        r"more cells than the header, which has 2\. Found 3 cells in line 3\.",
    ),
    "an id twice": (HEADER + b"c0\tc0.pt\nc0\tother.pt\n", r"must be unique\. Found 'c0' twice"),
    "an id with a path": (
        HEADER + b"../../c0\tc0.pt\n",
        r"A checkpoint's id becomes a file name.*Found '\.\./\.\./c0'",
    ),
    "a path to nothing": (HEADER + b"c0\t(touch ran)\n", rf"{GONE} \(touch ran\)"),
}


@pytest.mark.parametrize("name", TABLES)
def test_bad_table(workspace, name):
    content, expected = TABLES[name]
    path = workspace.path("table.tsv")
    path.write_bytes(content)
    if GONE in expected:  # which the preflight says, of a table that is good
        found = message(refuse(workspace, {"checkpoints": "table.tsv"}))
    else:
        code = "config.checkpoint_id" if name.startswith("an id") else "config.table"
        with refused(code) as error:
            checkpoint_table(str(path), None)
        found = str(error.value)
    assert re.search(expected, found)
    assert not list(workspace.folder.rglob("ran"))


def test_ids_that_differ_in_type_alone(workspace):
    with refused("config.checkpoint_id", re.compile(r"Found '1' twice")):
        check(workspace, {"checkpoints": {1: "c0.pt", "1": "c0.pt"}})

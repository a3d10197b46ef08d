"""A bad table of checkpoints or targets stops before any job, with one message."""

import re

import pytest
from refusals import as_text, check, message, refuse
from test_bad_checkpoint import CHECKPOINTS
from test_bad_config import CONFIGS, TEXTS, UNREADABLE
from test_bad_study import STUDIES, TEXTS_OF_A_STUDY

from trak_core.config.checkpoint_list import checkpoint_table
from trak_core.errors import InputError

HEADER = b"checkpoint\tpath\n"
COLUMNS = r"columns checkpoint, path, each once\. Missing:"
TEXT = r"the table must be tab-separated text in UTF-8\."
GONE = r"Checkpoints must exist\. Found nothing at:"
TABLES = {
    "a table without lines": (b"", rf"{COLUMNS} checkpoint, path"),
    "a table without rows": (HEADER, r"must have rows\. Found only a header"),
    "a table of other columns": (
        b"id\tfile\nc0\tc0.pt\n",
        rf"{COLUMNS} checkpoint, path; found id, file",
    ),
    "a column twice": (
        b"checkpoint\tpath\tpath\nc0\tc0.pt\tc1.pt\n",
        rf"{COLUMNS} none; found checkpoint, path, path",
    ),
    "a table with commas": (
        b"checkpoint,path\nc0,c0.pt\n",
        r"must be tab-separated .* Missing: checkpoint, path; found checkpoint,path",
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
        r"more cells than the header, 2\. Found 3 in line 3\.",
    ),
    "an id twice": (HEADER + b"c0\tc0.pt\nc0\tother.pt\n", r"must differ\. Found 'c0' twice"),
    "an id with a path": (
        HEADER + b"../../c0\tc0.pt\n",
        r"A checkpoint's id becomes a file name.*Found '\.\./\.\./c0'",
    ),
    "a table with a null byte": (HEADER + b"c0\tc0\0.pt\n", rf"{GONE} c0\0\.pt"),
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
        with pytest.raises(InputError) as error:
            checkpoint_table(str(path), None)
        found = str(error.value)
    assert re.search(expected, found)
    assert not list(workspace.folder.rglob("ran"))


def test_ids_that_differ_in_type_alone(workspace):
    with pytest.raises(InputError, match="Found '1' twice"):
        check(workspace, {"checkpoints": {1: "c0.pt", "1": "c0.pt"}})


def test_tables_work(workspace):
    workspace.path("checkpoints.tsv").write_text("checkpoint\tpath\nc0\tc0.pt\n")
    workspace.path("targets.tsv").write_text("id\npatient-342\n")
    tables = {"checkpoints": "checkpoints.tsv", "experiments": {"mine": {"targets": "targets.tsv"}}}
    status, output = workspace.snakemake("-n", text=as_text(tables))
    assert status == 0, output


def test_bad_input_is_counted():
    """Every bad input, of all kinds, has a message of its own to look for."""
    tables = [CONFIGS, TEXTS, UNREADABLE, TABLES, STUDIES, TEXTS_OF_A_STUDY, CHECKPOINTS]
    names = [name for table in tables for name in table]
    assert len(set(names)) == len(names) >= 90
    assert all(expected for table in tables for _, expected, *_ in table.values())

"""A bad table of checkpoints stops before any job, with one message."""

import pytest
from refusals import check
from refused import refused

HEADER = b"checkpoint\tpath\n"
# What the message must name, by error code.
TABLES = {
    "config.table": {
        "without rows": (HEADER, "only a header"),
        "with commas": (
            b"checkpoint,path\nc0,c0.pt\n",
            *("tab-separated", "Missing: checkpoint, path", "Found checkpoint,path"),
        ),
        "not UTF-8": (HEADER + b"c0\tcaf\xe9.pt\n", "tab-separated", "'utf-8' codec"),
        "a quote without an end": (HEADER + b'c0\t"c0.pt\nc1\tc0.pt\n', "unexpected end"),
        "a row without a path": (HEADER + b"c0\n", "Found 'c0', '' in line 2"),
        "more cells than the header": (
            HEADER + b"c0\tc0.pt\t\nc1\tc1.pt\trun1\n",
            *("which has 2", "Found 3 cells in line 3"),
        ),
    },
    "config.checkpoint_id": {
        "an id twice": (HEADER + b"c0\tc0.pt\nc0\tother.pt\n", "Found 'c0' twice"),
        "an id with a path": (HEADER + b"../../c0\tc0.pt\n", "a file name", "'../../c0'"),
    },
    "config.missing_checkpoint": {
        "a path to nothing": (HEADER + b"c0\t(touch ran)\n", "(touch ran)")
    },
}
CASES = [(code, name) for code, tables in TABLES.items() for name in tables]


@pytest.mark.parametrize(("code", "name"), CASES)
def test_bad_table(workspace, code, name):
    content, *values = TABLES[code][name]
    workspace.path("table.tsv").write_bytes(content)
    with refused(code, *values):
        check(workspace, {"checkpoints": "table.tsv"})


def test_ids_that_differ_in_type_alone(workspace):
    with refused("config.checkpoint_id", "Found '1' twice"):
        check(workspace, {"checkpoints": {1: "c0.pt", "1": "c0.pt"}})

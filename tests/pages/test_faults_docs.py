"""Every fault of docs/faults.md names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/faults.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "| fault |" not in line]


def defined():
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node.name


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named
    assert named - set(defined()) == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_fault_has_a_test(row):
    assert re.search(r"`test_\w+`|the same", row.split("|")[-2])

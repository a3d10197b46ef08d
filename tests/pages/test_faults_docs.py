"""Every fault of docs/how-to/faults.md names tests that exist, except Snakemake's own messages."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/how-to/faults.md").read_text()
BEFORE, SNAKEMAKES = PAGE.split("## What Snakemake itself says")
OWN = BEFORE + SNAKEMAKES.split("## Broken files")[1]
ROWS = [line for line in OWN.splitlines() if line.startswith("| ") and "| fault |" not in line]


def test_every_fault_has_a_test():
    assert len(ROWS) > 20
    assert [row for row in ROWS if not re.search(r"`test_\w+`|the same", row.split("|")[-2])] == []


def test_every_test_that_is_named_exists():
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    defined = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, flags=re.M)}
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - defined == set()

"""Benchmarks that no other test runs, and the pages that name them. Most take long."""

import re
import subprocess
import sys

import pytest
from workspace import REPOSITORY


def test_architectures_take_their_way_and_are_right():
    pytest.importorskip("transformers", reason="needs transformers, which `make test` has")
    kinds = "gpt2", "mixtral", "bloom", "phi3", "mamba2", "t5", "whisper", "wav2vec2"
    command = [sys.executable, REPOSITORY / "benchmarks/architectures.py", *kinds]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = run.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert found[:5] == ["transformers", str(len(kinds)), "0", "0", "0"]
    assert 0 < float(found[5].rstrip("| ")) < 1e-5


def test_pages_name_benchmarks_that_there_are():
    """A script that is gone stands without its folder, beside the commit that has it."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    for page in [*pages, REPOSITORY / "benchmarks/RESULTS.md"]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"(?<!90c10837:)benchmarks/[\w/]+\.py", text):
            assert (REPOSITORY / name).exists(), f"{page}: {name}"

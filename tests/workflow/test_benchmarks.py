"""Benchmarks that no other test runs, and the pages that name them. Most take long."""

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

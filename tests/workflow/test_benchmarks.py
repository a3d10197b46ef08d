"""Benchmarks that no other test runs: small, as their pages call them, beside what is known."""

import ast
import importlib
import re
import subprocess
import sys

import pytest
from workspace import REPOSITORY


def rows(name: str, *options: str) -> list[list[str]]:
    """Run a benchmark and return the fields of the lines that it prints."""
    command = [sys.executable, REPOSITORY / "benchmarks" / name, *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [re.split(r" \| |\s{2,}", line.strip("| ")) for line in run.stdout.splitlines()]


def test_files_of_all_stages_are_as_large_as_the_formulas_say():
    n, m, k = 2048, 384, 256  # whole chunks
    table = rows("sizes.py", f"--train={n}", f"--targets={m}", f"--proj-dim={k}", "--checkpoints=1")
    bytes_of = {
        "compute_features train": 4 * n * k,
        "compute_features mine": 4 * m * k,
        "compute_normal_matrix": 8 * k * k,
        "compute_scores": 4 * n * m,
        "average_scores": 4 * n * m,
    }
    assert [row[0] for row in table[2:]] == list(bytes_of)
    for stage, _seconds, peak, *sizes in table[2:]:
        found, formula = map(float, sizes)
        assert formula == pytest.approx(bytes_of[stage] / 2**20, abs=0.05)
        # Beside it: 40 top influences a target and their index, ids, labels, specifications.
        assert formula - 0.1 <= found <= formula + 1.5, stage
        assert 30 < float(peak) < 1500, stage


def test_the_stages_influences_are_those_of_numpy():
    """It ends with an error if they are not, and reads what stages read: each file twice."""
    table = rows("influences.py", "--train=9000", "--targets=30", "--proj-dim=64")
    stages = ["compute_normal_matrix", "compute_scores", "average_scores"]
    assert [row[0] for row in table[2:-1]] == [*stages, "numpy"]
    assert table[-1][0].startswith("stages together: ")
    assert all(0 < float(row[2]) < 1500 for row in table[2:-1])


def test_errors_of_sketches_are_those_of_their_theory():
    """Norms of dense projections err by sqrt(2 / k) at most; samples of one matrix share errors."""
    table = rows("sketch_quality.py", "digits", "--seeds=2", "--epochs=1", "--proj-dims=256")
    found = {row[2]: row for row in table if row[0] == "digits"}
    assert list(found) == ["rademacher", "hadamard", "tensor_sketch", "Kronecker a layer"]
    for kind in ("rademacher", "hadamard", "tensor_sketch"):
        _, _, _, numbers, norm, spearman, same_of_ten = found[kind]
        assert numbers == "256"
        assert 0.02 < float(norm) < 2 * (2 / 256) ** 0.5
        assert 0.7 < float(spearman) <= 1
        assert 7 < float(same_of_ten) <= 10


def test_architectures_take_their_way_and_are_right():
    pytest.importorskip("transformers", reason="needs transformers, which `make test` has")
    kinds = "gpt2", "mixtral", "bloom", "phi3", "mamba2", "t5", "whisper", "wav2vec2"
    *_, found = rows("architectures.py", *kinds)
    assert found[:5] == ["transformers", str(len(kinds)), "0", "0", "0"]
    assert 0 < float(found[5]) < 1e-5


def test_benchmarks_import_what_there_is():
    """Most take long, and no test runs them."""
    for path in (REPOSITORY / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trak_core"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")

"""A job computes where the config says, and one process has one GPU."""

import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch
from pipeline import features_spec
from workspace import REPOSITORY

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.errors import InputError
from trak_core.model.device import device_name, find_device
from trak_core.stages.compute_features import compute_features

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="runs on a machine with an NVIDIA GPU")


@pytest.fixture
def features(tmp_path, monkeypatch):
    """Compute features of two targets on a device; return the file's numbers and provenance."""
    study, targets = REPOSITORY / "tests/studies/diabetes.py", ["patient-342", "patient-400"]
    # The GPU that this process holds is no other's loss.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    torch.save(model.state_dict(), tmp_path / "c0.pt")

    def computed(device):
        file = tmp_path / f"{device}.h5"
        compute_features(
            features=file,
            checkpoint=tmp_path / "c0.pt",
            study_file=study,
            spec=features_spec("regression", 32, split="mine", targets=targets),
            targets=targets,
            code="",
            device=device,
            batch_size=2,
            memory_mb=500,
            threads=1,
        )
        with open_artifact(file, FEATURES) as artifact:
            return torch.tensor(artifact.matrix("features")[:]), artifact.provenance["device"]

    return computed


def test_auto_takes_what_there_is_and_says_so(features, capsys):
    numbers, where = features("auto")
    assert where.startswith("cuda " if HAS_GPU else "cpu")
    assert f"gradients on {where}" in capsys.readouterr().out
    expected, _ = features("cpu")
    torch.testing.assert_close(numbers, expected)


@pytest.mark.skipif(HAS_GPU, reason="runs on a machine without a GPU")
def test_cuda_is_never_replaced():
    with pytest.raises(
        InputError, match=r"torch must find a CUDA device\. Found none.*cpu or auto"
    ):
        find_device("cuda")


def test_the_cpu_is_taken_where_it_is_asked_for():
    assert device_name(find_device("cpu")) == "cpu"


@needs_gpu
def test_cuda_computes_the_cpu_s_features(features):
    numbers, where = features("cuda")
    assert re.match(r"cuda \S", where)
    expected, _ = features("cpu")
    torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-5)


HOLD = """
import sys
from trak_core.model.device import hold_one
print(hold_one(("first", "second")), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path):
    """Start a process that takes one of two GPUs and holds it."""
    started = []

    def start():
        process = subprocess.Popen(
            (sys.executable, "-c", HOLD),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_jobs_side_by_side_have_a_gpu_each_and_a_killed_one_blocks_nobody(job):
    """Real processes and locks; the GPUs are names."""
    first = job()
    assert first.stdout.readline() == "0\n"
    second = job()
    assert second.stdout.readline() == "1\n"
    third = job()
    assert third.stdout.readline() == "Waiting: other jobs hold all GPUs (2).\n"
    first.kill()
    assert third.stdout.readline() == "0\n"

"""A job computes on the device of the config, and each process has one GPU."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from own_checkpoints import network
from pipeline import ON_CPU, features_spec
from refused import refused
from workspace import REPOSITORY

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution import project_gradients
from trak_core.attribution.device import hold_one
from trak_core.stages.compute_features import compute_features

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="runs on a machine with an NVIDIA GPU")


@pytest.fixture
def features(tmp_path, monkeypatch):
    """Compute features of two targets on a device; return the file's numbers and provenance."""
    study, targets = REPOSITORY / "tests/studies/diabetes.py", ["patient-342", "patient-400"]
    # Locks of this process must not block others.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.save(network().state_dict(), tmp_path / "c0.pt")

    spec = features_spec("regression", 32, split="mine", targets=targets)
    inputs = {"checkpoint": tmp_path / "c0.pt", "study_file": study, "targets": targets}

    def computed(device):
        file = tmp_path / f"{device}.h5"
        compute_features(
            features=file, spec=spec, **inputs, **ON_CPU | {"device": device, "batch_size": 1}
        )
        with open_artifact(file, FEATURES) as artifact:
            return torch.tensor(artifact.matrix("features")[:]), artifact.provenance["device"]

    return computed


def test_auto_uses_the_available_device_and_logs_it(features, capsys):
    numbers, where = features("auto")
    assert where.startswith("cuda " if HAS_GPU else "cpu")
    assert f"gradients on {where}" in capsys.readouterr().out
    expected, where = features("cpu")
    assert where == "cpu"
    torch.testing.assert_close(numbers, expected)


@needs_gpu
def test_cuda_computes_the_cpu_s_features(features):
    numbers, where = features("cuda")
    assert re.match(r"cuda \S", where)
    expected, _ = features("cpu")
    torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-5)


class LateCopies:
    """Copies from a GPU whose numbers arrive when their event is awaited."""

    def __init__(self, tensors):
        self.tensors, self.copies = tensors, [torch.full_like(x, -7) for x in tensors]

    def synchronize(self):
        for copy, tensor in zip(self.copies, self.tensors, strict=True):
            copy.copy_(tensor)


def test_copies_of_a_batch_are_awaited_before_they_are_stored(features, monkeypatch):
    expected, _ = features("cpu")

    def copied(tensors):
        event = LateCopies(tensors)
        return event.copies, event

    monkeypatch.setattr(project_gradients, "_copied", copied)
    numbers, _ = features("cpu")
    assert torch.equal(numbers, expected)


HOLD = """
import os, signal, sys
from trak_core.attribution import project_gradients
from trak_core.attribution.device import hold_one

for _ in sys.stdin:
    if not os.fork():
        print(os.getpid(), flush=True)
        print(hold_one(("first", "second")), flush=True)
        signal.pause()
"""


@pytest.fixture
def server(tmp_path):
    """A process that forks a job for each line. The job holds a GPU."""
    server = subprocess.Popen(
        (sys.executable, "-c", HOLD),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    yield server
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()


def test_each_job_has_a_gpu_and_a_killed_job_releases_it(server):
    """With real processes and locks. The GPUs are names."""
    read = server.stdout.readline

    def start():
        server.stdin.write("\n")
        return int(read())

    first = start()
    assert read() == "0\n"
    start()
    assert read() == "1\n"
    start()
    assert read() == "Waiting for a GPU, because other jobs use all GPUs (2).\n"
    os.kill(first, signal.SIGKILL)
    assert read() == "0\n"


def test_a_folder_of_temporary_files_without_locks(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with refused("model.gpu_locks", tmp_path, "No locks available", "TMPDIR=/dev/shm"):
        hold_one(("first",))

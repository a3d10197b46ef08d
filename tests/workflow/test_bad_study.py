"""A study whose functions are not what they must be stops before any job, with one message."""

import contextlib
import re
import time

import psutil
import pytest
from refusals import STUDY, as_text, check, preflight
from refused import refused

DATA = "return TensorDataset(x[:342], y[:342])"
NOISY = """class Noisy(tuple):
    def __new__(cls):
        return super().__new__(cls, (0, 0))

    def __iter__(self):
        return iter((torch.randn(10), torch.tensor(1.0)))
"""
# The input of the last sample of 342 is another one each time.
RARELY_NOISY = """class TensorDataset(TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + torch.randn(10) * (index == 341), label
"""
# A text of the good study, what stands in its place, the error's code, and what it names.
STUDIES = {
    "no model function": (
        *("def make_model", "def build_model"),
        *("study.no_function", "make_model()", "build_model, train_data"),
    ),
    "model function returns no model": (
        *("return nn.Sequential(", "return len, (nn.Sequential, "),
        *("study.model_type", "make_model()", "Found tuple"),
    ),
    "no data": ("x[:342], y[:342]", "x[:0], y[:0]", "study.no_samples", "train_data()"),
    "data fails": (
        *(DATA, "return open('gone.csv')"),
        *("study.failed", "train_data()", "FileNotFoundError", "gone.csv"),
    ),
    "label not finite": (
        *("in (x, y))\n\n", "in (x, y))\ny[7] = float('nan')\n"),
        *("gradients.label_value", "train_data()", "nan in sample 7"),
    ),
    "ids twice": ("patient-{i}", "patient-{i // 2}", "study.ids", "target_ids()"),
    "ids with a null byte": ("patient-{i}", "patient-{i}\\0", "study.ids", r"'patient-342\x00'"),
    "samples change": (
        *(DATA, "return [Noisy()] * 4\n\n\n" + NOISY),
        *("study.random_samples", "different values when sample 0 was read"),
    ),
    "one sample of many changes": (
        *(DATA, DATA + "\n\n\n" + RARELY_NOISY),
        *("study.random_samples", "different values when sample 341 was read"),
    ),
    "sample does not fit the model": (
        *("nn.Linear(10, 32)", "nn.Linear(11, 32)"),
        *("gradients.model_call", "(1, 10) float32", "RuntimeError"),
    ),
    "study leaves Python": (
        *("import torch\n", "import torch\nimport sys\nsys.exit(0)\n"),
        *("study.failed", "SystemExit: 0"),
    ),
}


def edited(workspace, name, old, new):
    """Write the study with something else in it, under a name of its own."""
    good = workspace.path(STUDY).read_text()
    assert old in good
    path = workspace.path(f"{re.sub(r'[^a-z]', '_', name)}.py")
    path.write_text(good.replace(old, new))
    return path


@pytest.mark.parametrize("name", STUDIES)
def test_bad_study(workspace, name):
    old, new, code, *values = STUDIES[name]
    path = edited(workspace, name, old, new)
    with refused(code, str(path), *values):
        preflight(path, {"train": None, "mine": ["patient-342"]})


def test_a_study_that_crashes(workspace):
    path = edited(workspace, "crash", "import torch\n", "import os\nos.abort()\n")
    with refused("config.preflight", "crash.py", "exit status -6"):
        check(workspace, {"study": path.name})


def test_a_study_that_prints(workspace):
    """What it prints is shown and is not taken for an answer."""
    path = workspace.path(STUDY)
    good = path.read_text()
    noise = "\nprint('loading')\n"
    try:
        path.write_text(good + noise)
        status, output = workspace.snakemake("-n", text=as_text({}))
    finally:
        path.write_text(good)
    assert status == 0, output
    assert "loading" in output


LEAVES = """
import os, threading, time
threading.Thread(target=time.sleep, args=(600,), name="my logger").start()
if os.fork() == 0:
    time.sleep(600)
"""


def test_a_study_that_leaves_a_thread_and_a_process(workspace):
    """The start does not wait for them."""
    path = edited(workspace, "leaves", "import torch\n", f"import torch\n{LEAVES}")
    began = time.monotonic()
    try:
        check(workspace, {"study": path.name})
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(workspace.folder):
                    process.kill()
    assert time.monotonic() - began < 300

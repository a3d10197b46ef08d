"""A study whose functions are not what they must be stops before any job, with one message."""

import contextlib
import re
import time

import psutil
import pytest
from refusals import STUDY, as_text, check, message, preflight, refuse

from trak_core.errors import InputError

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
ENDS = r"must end without an error\. Found"
# A text of the good study, what stands in its place, and the refusal.
STUDIES = {
    "no model function": (
        *("def make_model", "def build_model"),
        r"the study must define a function make_model\(\)\. Found build_model, train_data",
    ),
    "model function returns no model": (
        *("return nn.Sequential(", "return len, (nn.Sequential, "),
        r"make_model\(\) must return a torch\.nn\.Module\. Found tuple",
    ),
    "no data": ("x[:342], y[:342]", "x[:0], y[:0]", r"train_data\(\) must return at least one"),
    "data fails": (
        *(DATA, "return open('gone.csv')"),
        rf"train_data\(\) {ENDS} FileNotFoundError: .*gone\.csv",
    ),
    "label not finite": (
        *("in (x, y))\n\n", "in (x, y))\ny[7] = float('nan')\n"),
        r"train_data\(\): Labels must be finite numbers\. Found nan in sample 7",
    ),
    "ids twice": (*("patient-{i}", "patient-{i // 2}"), r"target_ids\(\) must contain unique ids"),
    "ids with a null byte": (
        *("patient-{i}", "patient-{i}\\0"),
        r"strings of 1 to 255 bytes, but not the string nan\. Found 'patient-342\\x00'",
    ),
    "samples change": (
        *("return TensorDataset(x[:342], y[:342])", "return [Noisy()] * 4\n\n\n" + NOISY),
        r"must be the same whenever it is read\. Found two versions of 0, .* augmentation",
    ),
    "one sample of many changes": (
        *(DATA, DATA + "\n\n\n" + RARELY_NOISY),
        r"Found two versions of 341, when 32 samples were read twice\. Remove random steps",
    ),
    "sample does not fit the model": (
        *("nn.Linear(10, 32)", "nn.Linear(11, 32)"),
        r"called with one sample of \(1, 10\) float32, .* dtype float32\. Found RuntimeError",
    ),
    "study leaves Python": (
        *("import torch\n", "import torch\nimport sys\nsys.exit(0)\n"),
        rf"the study's file {ENDS} SystemExit: 0",
    ),
}


def edited(workspace, name, old, new):
    """Write the study with something else in it, under a name of its own."""
    good = workspace.path(STUDY).read_text()
    assert old in good
    path = workspace.path(f"{re.sub(r'[^a-z]', '_', name)}.py")
    path.write_text(good.replace(old, new))
    return path


CODES = {
    **dict.fromkeys(("data fails", "study leaves Python"), "study.failed"),
    "no model function": "study.no_function",
    "model function returns no model": "study.model_type",
    "no data": "study.no_samples",
    "label not finite": "gradients.label_value",
    "ids twice": "study.ids",
    "ids with a null byte": "study.ids",
    **dict.fromkeys(("samples change", "one sample of many changes"), "study.random_samples"),
}


@pytest.mark.parametrize("name", STUDIES)
def test_bad_study(workspace, name):
    old, new, expected = STUDIES[name]
    path = edited(workspace, name, old, new)
    with pytest.raises(InputError) as error:
        preflight(path, {"train": None, "mine": ["patient-342"]})
    found = " ".join(str(error.value).split())
    assert re.search(expected, found)
    assert str(path) in found
    assert error.value.code == CODES.get(name, error.value.code)


def test_a_study_that_crashes(workspace):
    path = edited(workspace, "crash", "import torch\n", "import os\nos.abort()\n")
    found = message(refuse(workspace, {"study": path.name}))
    assert re.search(r"crash\.py: the study must load\. .* ended with exit status -6 and", found)


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

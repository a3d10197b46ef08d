"""A study whose functions are not what they must be stops before any job, with one message."""

import contextlib
import re
import time

import psutil
import pytest
from refusals import GOOD, STUDY, as_text, check, message, preflight, refuse
from workspace import Workspace

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
        r"the study must define a function make_model\(\)\. Found none",
    ),
    "model function returns no model": (
        *("return nn.Sequential(", "return len, (nn.Sequential, "),
        r"make_model\(\) must return a torch\.nn\.Module\. Found tuple",
    ),
    "two classes of one name": (
        *("def make_model", "def class_names():\n    return ['a', 'b', 'a']\n\n\ndef make_model"),
        r"class_names\(\) must return a different str for each class\. Found 'a', 2 times",
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
    "ids are a number": (
        *('return [f"patient-{i}" for i in range(342, 442)]', "return 100"),
        rf"target_ids\(\), .*, {ENDS} TypeError: 'int' object is not it",
    ),
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
    "describe fails": (
        *("def make_model", "def describe(sample):\n    return sample['text']\n\n\ndef make_model"),
        rf"train_data\(\): .*describe\(\) of sample 0 {ENDS} TypeError: .*line \d+, in describe",
    ),
    "import fails": (
        *("import torch\n", "import torch\nimport no_such_module\n"),
        rf"the study's file {ENDS} ModuleNotFoundError: .*'no_such_module' .*line 8, in <module>",
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


FAILS = ("data fails", "ids are a number", "describe fails", "import fails", "study leaves Python")
CODES = {
    **dict.fromkeys(FAILS, "study.failed"),
    "no model function": "study.no_function",
    "model function returns no model": "study.model_type",
    "two classes of one name": "study.class_names",
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


TEXTS_OF_A_STUDY = {
    "a study with a null byte": (
        b"a = 1\0\n",
        r"bytes\.py: the study must be code that Python.* null bytes",
    ),
    "a study that is not UTF-8": (b"a = '\xe9'\n", r"bytes\.py: the study must be code .*utf-8"),
}


@pytest.mark.parametrize("name", TEXTS_OF_A_STUDY)
def test_what_is_no_python(workspace, name):
    content, expected = TEXTS_OF_A_STUDY[name]
    workspace.path("bytes.py").write_bytes(content)
    assert re.search(expected, message(refuse(workspace, {"study": "bytes.py"})))


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


def test_label_out_of_range(tmp_path):
    config = {**GOOD, "model_output": "image_classification"}
    config["experiments"] = {"mine": {"targets": [1506]}}
    workspace = Workspace.make(tmp_path / "study", "small_digits.py", config)
    workspace.path("c0.pt").write_bytes(b"")
    study = workspace.path("small_digits.py")
    study.write_text(study.read_text().replace("nn.Linear(16, 10)", "nn.Linear(16, 9)"))
    found = message(workspace.fail("-n"))
    assert "train_data(): Labels must be integers from 0 to 8, the classes of the study's" in found
    assert "Found 9 in sample" in found

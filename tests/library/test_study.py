"""Samples of a study as batches: what can be stacked, and what is refused."""

import re
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unicodedata import normalize

import numpy as np
import pytest
import torch
from pipeline import features_spec
from refused import refused

from trak_core.attribution.fitted_attributor import Setup
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.queries.open_run import OpenRun
from trak_core.study.dataset_split import Split, with_label
from trak_core.study.study import Study

REASON = re.compile(r"(?<=entry 0: |for ids: ).+")  # torch's own words


def batch(*samples):
    return Split(samples, list(range(len(samples)))).batch(0, len(samples))


def test_tuples_stay_tuples():
    x, y = batch((torch.zeros(3), 1), (torch.ones(3), 2))
    assert torch.equal(x, torch.tensor([[0.0] * 3, [1.0] * 3]))
    assert torch.equal(y, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    "kind", [int, np.int64, np.uint8, np.array, torch.tensor, lambda x: np.array(x, np.int16)]
)
@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: {"x": x, "labels": y}])
def test_another_label_is_of_the_type_of_its_own(kind, make):
    before = make(torch.ones(2), kind(1))
    after = with_label(before, 2)
    a, b = (x["labels"] if isinstance(x, dict) else x[-1] for x in (before, after))
    assert b == 2
    assert type(a) is type(b)
    assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
    assert np.shape(a) == np.shape(b) == ()


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_dicts_stay_dicts(kind):
    """Of tensors, arrays, numbers and lists of numbers; a tokenizer's result is a UserDict."""
    one = kind(input_ids=[4, 5, 6], mask=np.ones(3), image=torch.zeros(2, 2), labels=1)
    two = kind(input_ids=[7, 8, 9], mask=np.zeros(3), image=torch.zeros(2, 2), labels=0)
    found = batch(one, two)
    assert isinstance(found, dict)
    assert list(found) == ["input_ids", "mask", "image", "labels"]
    assert torch.equal(found["input_ids"], torch.tensor([[4, 5, 6], [7, 8, 9]]))
    assert found["mask"].shape == (2, 3)
    assert found["image"].shape == (2, 2, 2)
    assert found["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("samples", "code", "values"),
    [
        ([{"ids": [1, 2]}, {"ids": [1]}], "sample_shapes", [REASON, "list for ids"]),
        ([(torch.zeros(3), 0), (torch.zeros(4), 0)], "sample_shapes", [REASON, "(3,), (4,)"]),
        ([("a text", 0), ("another", 1)], "sample_shapes", [REASON, "str for entry 0"]),
        ([(None, 0)], "sample_shapes", [REASON, "NoneType for entry 0"]),
        ([torch.zeros(3)], "sample_type", ["Tensor", "a tuple `(inputs, labels)`"]),
        ([{"x": 0, "labels": 1}, {"x": 0}], "sample_entries", ["x, labels in sample 0", 1]),
        ([(1, 2), (1, 2, 3)], "sample_entries", ["entry 0, entry 1 in sample 0", "entry 2"]),
    ],
)
def test_what_cannot_be_stacked(samples, code, values):
    with refused(f"study.{code}", *values):
        batch(*samples)


def test_a_model_over_several_devices_is_refused(tmp_path):
    path = tmp_path / "study.py"
    path.write_text(
        "from torch import nn\n\n\ndef make_model():\n    model = nn.Linear(2, 1)\n"
        "    model.hf_device_map = {'0': 'cpu', '1': 'disk'}\n    return model\n"
    )
    with refused("study.device_map", "cpu, disk"):
        Study.load(path).make_model()


SPLIT = """
import torch
from torch.utils.data import random_split


def make_model():
    return torch.nn.Linear(2, 3)


def train_data():
    train, _ = random_split([(torch.full((2,), float(i)), 0) for i in range(90)], [50, 40])
    return train
"""


def test_data_that_are_split_at_random_do_not_depend_on_the_model(tmp_path):
    """Jobs that show samples build no model."""
    (tmp_path / "study.py").write_text(SPLIT)
    study = Study.load(tmp_path / "study.py")
    torch.save(study.make_model().state_dict(), tmp_path / "c0.pt")
    torch.manual_seed(0)
    expected, _ = study.split("train", None).batch(0, 50)
    torch.manual_seed(0)
    spec = features_spec("image_classification", 32)
    LoadedModel.of_study(study, tmp_path / "c0.pt", spec, torch.device("cpu"))
    found, _ = study.split("train", None).batch(0, 50)
    assert torch.equal(found, expected)


def test_a_study_that_changes_the_working_folder_is_refused(tmp_path):
    """The next that was not found was a checkpoint, which is there."""
    before, path = Path.cwd(), tmp_path / "goes_away.py"
    path.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n")
    with refused("study.chdir", path, f"change to {tmp_path.resolve()}"):
        Study.load(path)
    assert Path.cwd() == before


TRAINS = """import torch
transform = lambda image: image

def steps(model):
    model(torch.ones(1, 2)).sum().backward()

def main(model):
    steps(model)

"""


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("main(torch.nn.Linear(2, 1))", "line 10"),
        ("for i in range(2):\n    steps(torch.nn.Linear(2, 1))", "line 11"),
        ("torch.ones(1, requires_grad=True).sum().backward()", "line 10"),
        ("if __name__ == '__main__':\n    main(torch.nn.Linear(2, 1))", None),
        ("model = torch.nn.Linear(2, 1)\nmodel.train()\ntransform(model)", None),
        ("try:\n    import apex\nexcept ImportError:\n    def fit(x):\n        x.backward()", None),
        ("fit = lambda x: x.backward()", None),
    ],
)
def test_a_file_that_trains_when_it_is_imported_is_refused(here, last, words):
    """A training script whose transform a config names would train in every job."""
    path = Path("train_script.py")
    path.write_text(TRAINS + last + "\n")
    if words is None:
        assert Study.load(path).has("transform")
    else:
        with refused("study.trains", path, words):
            Study.load(path)
        torch.ones(1, requires_grad=True).sum().backward()  # Training is possible afterwards.


SCRIPTED = """
import torch


def make_model():
    return torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2)))
"""


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_is_refused(tmp_path):
    path = tmp_path / "study.py"
    path.write_text(SCRIPTED)
    with refused("study.scripted_model", "Sequential"):
        Study.load(path).make_model()


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940, \u0939\u0940",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u0940"],
        ),
        # Persian with a joiner that isn't one, Hindi with one, and a hyphen that is seldom seen.
        ("\u0645\u06cc\u200c\u0631\u0648\u0645", ["\u0645\u06cc\u0631\u0648\u0645"]),
        ("\u0915\u094d\u200d\u0937 a\u00adb", ["\u0915\u094d\u0937", "ab"]),
        ("Caf\u00e9-CAF\u00c9", ["caf\u00e9", "caf\u00e9"]),
        ("Stra\u00dfe, STRASSE", ["strasse", "strasse"]),
        ("\uff21\uff22 \ufb01n", ["ab", "fin"]),
        ("snake_case x2 (a\n\tb)", ["snake_case", "x2", "a", "b"]),
        ("... \u2014", []),
    ],
)
def test_words_are_the_same_however_they_are_written(text, words, form):
    """In Hindi, Persian, Turkish, French and German; by hand, from Unicode's tables."""
    study = Study(Path("study.py"), ModuleType("study"))
    study.module.describe = lambda sample: normalize(form, sample)
    assert list(study.words(Split([text], ["a"]))) == [words]


def test_a_mapping_like_the_study_s_samples_is_one(tmp_path):
    (tmp_path / "lists.py").write_text(
        "import torch\n\ndef encode(x, y):\n    return {'x': torch.tensor(x), 'y': y}\n"
    )
    line = {"x": [1, 2], "y": 3}

    def asked(sample):
        run = OpenRun(tmp_path, SimpleNamespace(folder=tmp_path, in_folder=nullcontext))
        run.study = Study.load(tmp_path / "lists.py")
        run._setup = Setup(None, None, Split([sample], [0]))
        return run.asked(line).sample

    assert asked({"x": [4, 5], "y": 6}) is line
    for sample in ({"x": torch.ones(2), "y": 1}, ([1, 2], 3), {"z": [1], "y": 1}):
        assert isinstance(asked(sample)["x"], torch.Tensor)

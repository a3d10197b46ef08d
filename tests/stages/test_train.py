"""Training writes checkpoints, and is refused if it does not return models."""

import re
import sys

import pytest
import torch
import yaml
from refused import refused
from workspace import REPOSITORY

from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.load_checkpoint import load_checkpoint
from trak_core.study.study import Study

STUDY = """
from torch import nn

def make_model():
    return nn.Linear(2, 2)

def train(bias):
    model = make_model()
    nn.init.constant_(model.bias, bias)
    return model if bias != 8 else model.state_dict()
"""


def train(folder, study=STUDY, times=None, **arguments):
    """Write the study, and return the checkpoints of its training."""
    path = folder / "study.py"
    path.write_text(study)
    checkpoints = [folder / f"new/{i}.pt" for i in range(len(times or [1]))]
    train_checkpoint(
        checkpoints=checkpoints, study_file=path, arguments=arguments, times=times, threads=1
    )
    return checkpoints


def biases(checkpoints):
    model = torch.nn.Linear(2, 2)
    for path in checkpoints:
        load_checkpoint(model, path)
        yield model.bias[0].item()


def test_a_checkpoint_has_the_final_weights(tmp_path):
    assert list(biases(train(tmp_path, bias=3.0))) == [3]


@pytest.mark.parametrize(
    ("bias", "message"), [(float("nan"), "NaN or infinity in bias"), (8, "OrderedDict")]
)
def test_a_failed_training_writes_no_checkpoint(tmp_path, bias, message):
    with refused("study.train", re.compile(message)):
        train(tmp_path, bias=bias)
    assert not list(tmp_path.rglob("*.pt*"))


def test_the_default_study_has_97_percent_accuracy(tmp_path):
    config = yaml.safe_load((REPOSITORY / "config/config.yaml").read_text())
    path, checkpoint = REPOSITORY / config["study"], tmp_path / "seed0.pt"
    arguments = {"epochs": config["training"]["epochs"], "seed": 0}
    job = {"study_file": path, "arguments": arguments, "times": None, "threads": 1}
    train_checkpoint(checkpoints=[checkpoint], **job)
    study = Study.load(path)
    model = study.make_model()
    load_checkpoint(model, checkpoint)
    images, labels = study.split("held-out", None).batch(0, 597)
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    assert accuracy >= 0.97
    assert sum(p.numel() for p in model.parameters()) == 38_282
    assert sys.modules["digits"] is study.module


ALONG = """
from torch import nn

def make_model():
    return nn.Linear(2, 2)

def train(steps, data=None):
    model = make_model()
    for step in range(1, steps + 1):
        nn.init.constant_(model.bias, step)
        yield step / 4, model
    open("ended", "w").close()
"""


@pytest.mark.parametrize(
    ("times", "ends"), [([0.5, 1.75], False), ([0.25, 2], False), (None, True)]
)
def test_a_training_writes_a_checkpoint_at_each_time(here, times, ends):
    ended = list(biases(train(here, ALONG, times, steps=8)))
    assert ended == ([8] if times is None else [4 * at for at in times])
    # Training stops after the last time.
    assert (here / "ended").exists() == ends


@pytest.mark.parametrize(
    ("times", "study", "message"),
    [
        ([0.5, 0.6], ALONG, r"0\.6.*0\.25, 0\.5, 0\.75"),
        ([0.5], ALONG.replace("step / 4, model", "model"), "Linear"),
        ([0.5], ALONG.replace(", model\n", ", model.bias\n"), "Parameter"),
        (None, ALONG.replace("steps + 1", "1"), "NoneType"),
        ([0.5], ALONG.replace("model.bias, step", "model.bias, step / 0"), "division by zero"),
    ],
)
def test_a_training_must_yield_times_and_models(here, times, study, message):
    code = "study.failed" if message in {"division by zero", "Linear"} else "study.train"
    with refused(code, re.compile(message)):
        train(here, study, times, steps=8)
    assert not list(here.rglob("1.pt*"))

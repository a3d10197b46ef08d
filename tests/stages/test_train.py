import sys

import pytest
import torch
import yaml
from workspace import REPOSITORY

from trak_core.errors import InputError
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.checkpoints import load_checkpoint
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


def train(tmp_path, bias):
    study, checkpoint = tmp_path / "study.py", tmp_path / "new/c.pt"
    study.write_text(STUDY)
    train_checkpoint(checkpoint=checkpoint, study_file=study, arguments={"bias": bias}, threads=1)
    return checkpoint


def test_a_checkpoint_is_what_training_ended_with(tmp_path):
    model = torch.nn.Linear(2, 2)
    load_checkpoint(model, train(tmp_path, 3.0))
    assert model.bias.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (float("nan"), r"must end with finite weights\. Found NaN or infinity in bias"),
        (8, r"train\(\) must return the trained torch\.nn\.Module\. Found OrderedDict"),
    ],
)
def test_no_checkpoint_of_a_bad_training(tmp_path, bias, message):
    with pytest.raises(InputError, match=message):
        train(tmp_path, bias)
    assert not list(tmp_path.rglob("*.pt*"))


def test_the_default_study_learns_to_read(tmp_path):
    """At least 97 % of the held-out scans."""
    config = yaml.safe_load((REPOSITORY / "config/config.yaml").read_text())
    path = REPOSITORY / config["study"]
    arguments = config["training"] | config["checkpoints"]["seed0"]
    checkpoint = tmp_path / "seed0.pt"
    train_checkpoint(checkpoint=checkpoint, study_file=path, arguments=arguments, threads=1)
    study = Study.load(path)
    model = study.make_model()
    load_checkpoint(model, checkpoint)
    images, labels = study.split("held-out", None).batch(0, 597)
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    assert accuracy >= 0.97
    assert sum(p.numel() for p in model.parameters()) == 38_282
    assert sys.modules["digits"] is study.module

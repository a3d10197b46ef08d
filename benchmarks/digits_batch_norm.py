"""The default study with BatchNorm: its networks see batch statistics in training, means later."""

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "config"))

import digits
from digits import target_data, target_ids, train, train_data, train_ids

__all__ = ["make_model", "target_data", "target_ids", "train", "train_data", "train_ids"]


def make_model() -> nn.Module:
    """Return the default study's network with BatchNorm behind its convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


# What its train() makes.
digits.make_model = make_model

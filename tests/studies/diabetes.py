"""Disease progression of 442 patients: the README's study, without scikit-learn's long imports."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

_FILES = Path(find_spec("sklearn").origin).parent / "datasets/data"
x, y = (np.loadtxt(_FILES / f"diabetes_{name}.csv.gz") for name in ("data_raw", "target"))
x, y = (torch.tensor((a - a.mean(0)) / a.std(0)).float() for a in (x, y))


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def train_data():
    return TensorDataset(x[:342], y[:342])


def target_data():
    return TensorDataset(x[342:], y[342:])


def target_ids():
    return [f"patient-{i}" for i in range(342, 442)]

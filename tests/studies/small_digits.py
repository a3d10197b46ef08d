"""The default study, cut to 150 training samples and a net of some 1,000 parameters.

Its scans come out of scikit-learn's files: that library's imports would take each job longer than
all else that it does.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

_FILE = Path(find_spec("sklearn").origin).parent / "datasets/data/digits.csv.gz"
_IDS = np.random.default_rng(3).permutation(1797)[:190]


def _scans(ids):
    rows = torch.tensor(np.loadtxt(_FILE, delimiter=",", dtype=np.int64)[ids])
    return TensorDataset(rows[:, :64].float().reshape(-1, 1, 8, 8) / 16, rows[:, 64])


def train_ids():
    return _IDS[:150]


def target_ids():
    return _IDS[150:]


def train_data():
    return _scans(_IDS[:150])


def target_data():
    return _scans(_IDS[150:])


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.BatchNorm1d(36),
        nn.Dropout(0.5),
        nn.Linear(36, 16),
        nn.GELU(),
        nn.Linear(16, 10),
    )


def train(seed, steps, data=None):
    torch.manual_seed(seed)
    model = make_model()
    images, labels = default_collate(list(train_data() if data is None else data))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model

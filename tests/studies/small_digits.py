"""The default study, cut to 150 training samples and a net of some 1,000 parameters."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, default_collate

_IDS = np.random.default_rng(3).permutation(1797)[:190]


def _scans(ids):
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[ids], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[ids]))


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

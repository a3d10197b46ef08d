"""Tumours of 569 women, benign or malignant, with 30 numbers each, which networks fit closely.

Data: UCI, "Breast Cancer Wisconsin (Diagnostic)", which ships with scikit-learn.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

_ORDER = np.random.default_rng(0).permutation(569)
_DATA: Any = load_breast_cancer(return_X_y=True)
_X, _Y = _DATA
_SCALED = (_X - _X.mean(0)) / _X.std(0)


def _rows(ids: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(_SCALED[ids]).float(), torch.tensor(_Y[ids]))


def train_ids() -> np.ndarray:
    """Return the ids of the training samples."""
    return _ORDER[:469]


def target_ids() -> np.ndarray:
    """Return the ids of the held-out samples."""
    return _ORDER[469:]


def train_data() -> TensorDataset:
    """Return the training samples: (numbers (30,), label)."""
    return _rows(train_ids())


def target_data() -> TensorDataset:
    """Return the held-out samples."""
    return _rows(target_ids())


def make_model() -> nn.Module:
    """Return a network of 1,586 parameters."""
    return nn.Sequential(
        nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def losses(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return nn.functional.cross_entropy(predicted, labels, reduction="none")


def train(
    seed: int, epochs: int, data: Dataset | None = None, sample_weights: Tensor | None = None
) -> Iterator[tuple[int, nn.Module]]:
    """Train from scratch on ``data``, or all samples, and yield the model after every epoch."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    samples: Any = train_data() if data is None else data
    inputs, labels = default_collate(list(samples))
    weights = torch.ones(len(labels)) if sample_weights is None else sample_weights
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(labels)).split(40):
            loss = (losses(model(inputs[rows]), labels[rows]) * weights[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield epoch, model

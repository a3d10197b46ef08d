"""A regression: disease progression of 442 patients with ten numbers each.

Data: Efron et al., "Least Angle Regression", 2004, which ships with scikit-learn.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

import breast_cancer
from breast_cancer import train

__all__ = ["make_model", "target_data", "target_ids", "train", "train_data", "train_ids"]

_ORDER = np.random.default_rng(0).permutation(442)
_DATA: Any = load_diabetes(return_X_y=True)
_X, _Y = _DATA
_SCALED, _PROGRESS = _X / _X.std(0), (_Y - _Y.mean()) / _Y.std()


def _rows(ids: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(_SCALED[ids]).float(), torch.tensor(_PROGRESS[ids]).float())


def train_ids() -> np.ndarray:
    """Return the ids of the training samples."""
    return _ORDER[:342]


def target_ids() -> np.ndarray:
    """Return the ids of the held-out samples."""
    return _ORDER[342:]


def train_data() -> TensorDataset:
    """Return the training samples: (numbers (10,), progression)."""
    return _rows(train_ids())


def target_data() -> TensorDataset:
    """Return the held-out samples."""
    return _rows(target_ids())


def make_model() -> nn.Module:
    """Return a network of 385 parameters."""
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def losses(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return (predicted[:, 0] - labels) ** 2 / 2


# breast_cancer.train() uses these globals of its module.
breast_cancer.make_model, breast_cancer.train_data = make_model, train_data
breast_cancer.losses = losses

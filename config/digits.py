"""The default study: which of 1,200 scanned digits taught a small CNN to read other digits?

The data are the 1,797 scans of 8x8 pixels in scikit-learn (UCI, "Optical Recognition of Handwritten
Digits"). Ids are positions in this data set, so an id means the same scan in every split.
"""

from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

_N_TRAIN = 1200
# A fixed permutation, because the scans of each writer are in one block.
_ORDER = np.random.default_rng(0).permutation(1797)


def _scans(ids: np.ndarray) -> Dataset:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[ids], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[ids]))


def train_ids() -> np.ndarray:
    """Return the ids of the training samples."""
    return np.sort(_ORDER[:_N_TRAIN])


def target_ids() -> np.ndarray:
    """Return the ids of the held-out samples, any of which may be a target."""
    return np.sort(_ORDER[_N_TRAIN:])


def train_data() -> Dataset:
    """Return the training samples: (image (1, 8, 8), label)."""
    return _scans(train_ids())


def target_data() -> Dataset:
    """Return the held-out samples."""
    return _scans(target_ids())


def make_model() -> nn.Module:
    """Return a CNN of 38,282 parameters for 8x8 images and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(seed: int, epochs: int, data: Dataset | None = None) -> Iterator[tuple[int, nn.Module]]:
    """Train from scratch on ``data``, or all samples, and yield the model after every epoch.

    ``seed`` determines the initial weights and the order of samples.

    Yields:
        The number of epochs, and the model, which further epochs change.
    """
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    samples = train_data() if data is None else data
    loader = DataLoader(samples, batch_size=50, shuffle=True)
    for epoch in range(1, epochs + 1):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch == epochs:
            images, labels = next(iter(DataLoader(target_data(), batch_size=597)))
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
            print(f"held-out accuracy {accuracy:.1%} after {epochs} epochs, seed {seed}")
        yield epoch, model

"""The default study: which of 1,200 scanned digits taught a small CNN to read the others?

Data: 1,797 real 8x8 scans that ship inside scikit-learn (UCI, "Optical Recognition of Handwritten
Digits"). Ids are positions in that data set, so they mean the same in every split.
"""

from collections.abc import Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset

_N_TRAIN = 1200
# One fixed shuffle: the scans come in blocks of one writer each.
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


def train(
    seed: int, epochs: int, data: Dataset | None = None, sample_weights: Tensor | None = None
) -> Iterator[tuple[int, nn.Module]]:
    """Train from scratch on ``data``, or all samples, and yield the model after every epoch.

    ``seed`` decides first weights and order. Each sample's loss counts by its weight, 1 if there
    are none: samples of weight 0 are left out, and all else stays as it is.

    Yields:
        Epochs so far, and the model, which is trained on.
    """
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    samples = train_data() if data is None else data
    if sample_weights is None:
        sample_weights = torch.ones(len(samples))  # pyright: ignore[reportArgumentType]
    weighted = StackDataset(samples, TensorDataset(sample_weights))
    loader = DataLoader(weighted, batch_size=50, shuffle=True)
    for epoch in range(1, epochs + 1):
        for (images, labels), (weights,) in loader:
            losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
            loss = (losses * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch == epochs:
            images, labels = next(iter(DataLoader(_scans(target_ids()), batch_size=597)))
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
            print(f"held-out accuracy {accuracy:.1%} after {epochs} epochs, seed {seed}")
        yield epoch, model

"""A study with wrong labels: scanned digits labelled by two annotators, one of them careless.

`benchmarks/wrong_labels.py` runs this study for several draws. 900 of scikit-learn's 1,797 digits
are for training. The annotator anna labelled half of them with 2 % errors. bert labelled the other
half with 15 % errors, mostly by confusing two digits that look alike. 500 held-out and 397 test
digits have correct labels.
"""

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

DRAW = 0
N_TRAIN, N_HELD = 900, 500
WRONG = {"anna": 0.02, "bert": 0.15}
_ALIKE = {0: 6, 1: 7, 2: 3, 3: 8, 4: 9, 5: 6, 6: 5, 7: 1, 8: 3, 9: 4}

_random = np.random.default_rng([1, DRAW])
_digits: Any = load_digits()
_order = _random.permutation(len(_digits.target))
_images = torch.tensor(_digits.images[_order], dtype=torch.float32)[:, None] / 16
_labels = torch.tensor(_digits.target[_order])
annotators = np.where(_random.random(N_TRAIN) < 0.5, "anna", "bert")
is_wrong = _random.random(N_TRAIN) < np.vectorize(WRONG.get)(annotators)
_given = _labels.clone()
for _i in np.flatnonzero(is_wrong):
    _own = int(_labels[_i])
    _others = [c for c in range(10) if c != _own]
    _given[_i] = _ALIKE[_own] if _random.random() < 0.7 else int(_random.choice(_others))
_parts = ["held"] * N_HELD + ["test"] * (len(_labels) - N_TRAIN - N_HELD)


def make_model():
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


def train_data():
    return TensorDataset(_images[:N_TRAIN], _given[:N_TRAIN])


def target_data():
    return TensorDataset(_images[N_TRAIN:], _labels[N_TRAIN:])


def train_columns():
    return {"annotator": annotators.tolist()}


def target_columns():
    return {"part": _parts}


def train(steps, seed, data=None):
    """Yield the model after every fifth of ``steps``, a number that does not depend on the data."""
    torch.manual_seed(seed)
    data = train_data() if data is None else data
    images, labels = (torch.stack(part) for part in zip(*data, strict=True))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        batch = torch.randint(len(labels), (32,))
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 5) == 0:
            yield step // (steps // 5), model

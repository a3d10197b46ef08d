"""A regression of 500 rows with wrong labels: 14 are multiplied by 4, and 11 by 0.2."""

import numpy as np
import torch

OVERSTATED, WRONG = range(14), range(25)
# Predictions and labels are SIGN * (SCALE * number + OFFSET) of the same numbers.
STUDY = """
import torch
from torch.utils.data import TensorDataset

SIGN, SCALE, OFFSET = {sign}, {scale}, {offset}
generator = torch.Generator().manual_seed(0)
x = 2 * torch.rand(700, 6, generator=generator)
noise = torch.randn(700, generator=generator)
right = torch.exp(1 + 0.5 * torch.sin(2 * x[:, 0] + x[:, 1]) + 0.3 * x[:, 2] + 0.05 * noise)
given = right.clone()
given[:14] *= 4
given[14:25] *= 0.2


def moved(number):
    return SIGN * (SCALE * number + OFFSET)


class Moved(torch.nn.Sequential):
    def forward(self, inputs):
        return moved(super().forward(inputs))


def make_model():
    return Moved(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train_data():
    return TensorDataset(x[:500], moved(given[:500]))


def target_data():
    return TensorDataset(x[500:], moved(right[500:]))
"""


def with_three_checkpoints(folder, *, sign=1, scale=1, offset=0, made=None):
    """Write a study and its checkpoints, and return their paths; ``made`` has trained ones.

    The weights are the same whatever the sign, scale and offset.
    """
    study = folder / "study.py"
    study.write_text(STUDY.format(sign=sign, scale=scale, offset=offset))
    if made is not None:
        return study, made
    space = {}
    exec(STUDY.format(sign=1, scale=1, offset=0), space)
    checkpoints = {}
    for seed in range(3):
        torch.manual_seed(seed)
        model, (inputs, labels) = space["make_model"](), space["train_data"]().tensors
        optimizer = torch.optim.Adam(model.parameters(), 0.02, weight_decay=1e-3)
        for _ in range(300):
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - labels).square().mean().backward()
            optimizer.step()
        checkpoints[f"c{seed}"] = folder / f"c{seed}.pt"
        torch.save(model.state_dict(), checkpoints[f"c{seed}"])
    return study, checkpoints


def auc(values):
    """The probability that a wrong label has a larger value than a right one, over all pairs."""
    wrong, right = values[: len(WRONG)], values[len(WRONG) :]
    more, equal = wrong[:, None] > right, wrong[:, None] == right
    return float(np.mean(more + 0.5 * equal))

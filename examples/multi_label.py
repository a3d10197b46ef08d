"""Which scans taught a network which digits are even, over 4, divisible by 3 or below 2?"""

import torch
from fit import fit
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import logsigmoid
from torch.utils.data import Subset, TensorDataset

from trak_core.model_outputs.model_output import ModelOutput

pixels, digits = map(torch.tensor, load_digits(return_X_y=True))
holds = torch.stack([digits % 2 == 0, digits > 4, digits % 3 == 0, digits < 2], dim=1).float()
scans = TensorDataset(pixels.float() / 16, holds)


def log_likelihood(logits, labels):
    return logsigmoid(logits * (2 * labels - 1)).sum()


# The training loss is -f, so the loss weight has its default value, 1. Reports show the number of
# correct labels as the prediction.
labels = ModelOutput(
    value=log_likelihood,
    prediction=lambda logits, labels: ((logits > 0) == labels).sum().float(),
    label_number=lambda labels: labels.sum(),
)


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4))


def train_data():
    return Subset(scans, range(300))


def target_data():
    return Subset(scans, range(300, 400))


def train(seed, epochs, data=None):
    def losses(model, x, labels):
        return -torch.vmap(log_likelihood)(model(x), labels)

    return fit(make_model, data or train_data(), losses, seed, epochs)

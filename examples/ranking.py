"""Which pairs of wines taught a network which wine of another pair is stronger?"""

import torch
from fit import fit
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Subset, TensorDataset

from trak_core.model_outputs.model_output import ModelOutput

wines = torch.tensor(load_wine().data).float()
wines = (wines - wines.mean(0)) / wines.std(0)
pairs = torch.randint(len(wines), (400, 2), generator=torch.Generator().manual_seed(0))
swapped = wines[pairs[:, 0], 0] < wines[pairs[:, 1], 0]
pairs = torch.where(swapped[:, None], pairs.flip(1), pairs)
samples = TensorDataset(wines[pairs][:, :, 1:])  # without the alcohol itself


# f is the difference of two wines' points. The loss is log(1 + exp(-f)).
order = ModelOutput(
    value=lambda points, _: points[0] - points[1],
    loss_weight=lambda points, _: torch.sigmoid(points[1] - points[0]),
    has_labels=False,
)


def make_model():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten())


def train_data():
    return Subset(samples, range(300))


def target_data():
    return Subset(samples, range(300, 400))


def train(seed, epochs, data=None):
    def losses(model, pair):
        return softplus(model(pair).diff(dim=1))

    return fit(make_model, data or train_data(), losses, seed, epochs)

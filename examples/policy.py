"""Which attempts taught a policy to name digits? Correct names were rewarded."""

import torch
from fit import fit
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

random = torch.Generator().manual_seed(0)
scans, digits = map(torch.tensor, load_digits(return_X_y=True))
guesses = torch.randint(10, digits.shape, generator=random)
action = torch.where(torch.rand(len(digits), generator=random) < 0.4, digits, guesses)
advantage = torch.where(action == digits, 1.0, -0.3)
tries = TensorDataset(scans.float() / 16, torch.stack([action, advantage], dim=1))


def gain(logits, label):
    action, advantage = label
    return advantage * logits.log_softmax(0)[action.long()]


def make_model():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def train_data():
    return Subset(tries, range(300))


def target_data():
    return Subset(tries, range(300, 400))


def train(seed, epochs, data=None):
    def losses(model, scan, label):
        return -torch.vmap(gain)(model(scan), label)

    return fit(make_model, data or train_data(), losses, seed, epochs)

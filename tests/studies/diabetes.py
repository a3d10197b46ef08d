"""Disease progression of 442 patients: scikit-learn's diabetes data, a regression."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

x, y = load_diabetes(return_X_y=True)
x, y = torch.tensor(x).float() / x.std(), (torch.tensor(y).float() - y.mean()) / y.std()


def make_model():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def train_data():
    return TensorDataset(x[:342], y[:342])


def target_data():
    return TensorDataset(x[342:], y[342:])


def target_ids():
    return [f"patient-{i}" for i in range(342, 442)]

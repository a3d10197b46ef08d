"""Which scans taught an encoder to tell the second view of a scan from 50 other scans?"""

import torch
from fit import fit
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import Subset, TensorDataset

random = torch.Generator().manual_seed(0)
scans = torch.tensor(load_digits().data[:450]).float() / 16
first, second = (scans + 0.1 * torch.randn(450, 64, generator=random) for _ in range(2))
views = TensorDataset(first, second)


class Encoder(nn.Sequential):
    def forward(self, first, second):
        """Return the similarities of the first view to the second, and to 50 constant vectors."""
        u, v = (normalize(super(Encoder, self).forward(x)) for x in (first, second))
        with torch.no_grad():
            others = normalize(super().forward(scans[400:].to(first.device)))
        return 5 * torch.cat([(u * v).sum(1, keepdim=True), u @ others.T], dim=1)


def log_share(similarities):
    return similarities[0] - similarities.logsumexp(0)


def make_model():
    return Encoder(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))


def train_data():
    return Subset(views, range(300))


def target_data():
    return Subset(views, range(300, 400))


def train(seed, epochs, data=None):
    def losses(model, first, second):
        return -torch.vmap(log_share)(model(first, second))

    return fit(make_model, data or train_data(), losses, seed, epochs)

"""Which patients taught a Cox model which of the patients at risk falls ill first?"""

import torch
from fit import fit
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import Subset, TensorDataset

x, time = map(torch.tensor, load_diabetes(return_X_y=True))
x, random = x.float() / x.std(), torch.Generator().manual_seed(0)
event = torch.rand(len(x), generator=random) < 0.7  # the other patients left the study
# Draw twenty of the patients who are at risk when a patient falls ill. They are drawn only once,
# because a sample must have the same values whenever it is read.
chosen = [
    torch.multinomial(later.float(), 20, True, generator=random) for later in time >= time[:, None]
]
patients = TensorDataset(x, x[torch.stack(chosen)], event.float())


class Risk(nn.Sequential):
    def forward(self, patient, at_risk):
        return super().forward(torch.cat([patient[:, None], at_risk], dim=1)).squeeze(2)


def partial_likelihood(risks, event):
    return event * (risks[0] - risks.logsumexp(0))


def make_model():
    return Risk(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))


def train_data():
    return Subset(patients, range(300))


def target_data():
    return Subset(patients, range(300, 400))


def train(seed, epochs, data=None):
    def losses(model, patient, at_risk, event):
        return -torch.vmap(partial_likelihood)(model(patient, at_risk), event)

    return fit(make_model, data or train_data(), losses, seed, epochs)

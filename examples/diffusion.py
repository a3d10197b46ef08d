"""Which scans taught a diffusion model to remove the noise from a held-out scan?"""

import torch
from fit import fit
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

# Noise and time are drawn once, because a sample must have the same values whenever it is read.
random = torch.Generator().manual_seed(0)
clean = torch.tensor(load_digits().data[:400]).float() / 8 - 1
noise, time = torch.randn(400, 64, generator=random), torch.rand(400, 1, generator=random)
noised = (1 - time).sqrt() * clean + time.sqrt() * noise
scans = TensorDataset(noised, time, noise)


def minus_loss(guess, noise):
    return -(guess - noise).square().mean()


class Denoiser(nn.Sequential):
    def forward(self, x, time):
        return super().forward(torch.cat([x, time], dim=1))


def make_model():
    return Denoiser(nn.Linear(65, 48), nn.SiLU(), nn.Linear(48, 64))


def train_data():
    return Subset(scans, range(300))


def target_data():
    return Subset(scans, range(300, 400))


def train(seed, epochs, data=None):
    def losses(model, x, time, noise):
        return (model(x, time) - noise).square().mean(1)

    return fit(make_model, data or train_data(), losses, seed, epochs)

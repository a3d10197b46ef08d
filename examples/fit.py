"""The training loop of the studies in this folder."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def fit(
    make_model: Callable[[], nn.Module],
    samples: Dataset,
    losses: Callable[..., Tensor],
    seed: int,
    epochs: int,
) -> nn.Module:
    """Train a model with Adam and return it. ``losses(model, *batch)`` are the samples' losses."""
    torch.manual_seed(seed)
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in DataLoader(samples, batch_size=50, shuffle=True):
            adam.zero_grad()
            losses(model, *batch).mean().backward()
            adam.step()
    return model

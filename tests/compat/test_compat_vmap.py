"""Gradients by vmap of what users write for one sample: like those of plain autograd."""

import pytest
import torch
from torch import nn

from trak_core.compat._vmap import per_sample_gradients
from trak_core.gradients import formed_gradients, gradients_one_by_one, select_parameters
from trak_core.model_outputs.classification import CLASSIFICATION


class Writing(nn.Module):
    """Normalizes its input in place."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        x *= 2
        return self.model(x)


class Branching(nn.Module):
    """Takes one of three ways, by the sample's values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        y = self.linear(x)
        if (x[:, 0] > 0).all():
            return y**2 if x.sum() > 0 else -y
        return y.exp()


@pytest.mark.parametrize("writes", [False, True])
def test_samples_that_take_other_branches_keep_their_places(writes):
    x = torch.tensor([[1.0, 1, 1], [-1, 0, 2], [1, -3, 0], [2, 2, 2], [-1, 1, 0], [3, 3, 3]])
    model = Writing(Branching()) if writes else Branching()
    batch = (x, torch.tensor([0, 1, 2, 3, 0, 1]))
    parameters = select_parameters(model, None)
    expected = formed_gradients(gradients_one_by_one, model, parameters, CLASSIFICATION, batch)
    found = per_sample_gradients(model, parameters, CLASSIFICATION, batch)
    for a, b in zip(found.columns(), expected.columns(), strict=True):
        torch.testing.assert_close(a, b)
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[key], gradient)


class Numbers(nn.Module):
    """Asks a tensor for its number, which vmap cannot give."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) * (1 + abs(x.sum().item()))


def test_what_vmap_cannot_take():
    model, batch = Numbers(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 2, 0]))
    with pytest.raises(RuntimeError, match="vmap: It looks like you're either"):
        per_sample_gradients(model, select_parameters(model, None), CLASSIFICATION, batch)

"""Random chains of operations on tensors whose dimensions all have the size of the batch.

Shapes don't show along which dimension the samples lie, and some operations mix samples.
"""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from test_gramian import assert_equal, by_jacobian
from torch import nn

from trak_core.errors import InputError
from trak_core.gramian import Engine

pytestmark = pytest.mark.usefixtures("float64")
N = 3


def cut(draw, x, new):
    dim = draw.randrange(x.ndim)
    sizes = [(N, x.shape[dim] // N), (x.shape[dim] // N, N)]
    return x.unflatten(dim, draw.choice(sizes)) if x.shape[dim] % N == 0 and x.ndim < 4 else x


def linear(draw, x, new):
    return F.linear(x, new(x.shape[-1], x.shape[-1]), new(x.shape[-1]))


def convolve(draw, x, new):
    return F.conv1d(x, new(x.shape[1], x.shape[1], 1), new(x.shape[1])) if x.ndim == 3 else x.tanh()


def normalise(draw, x, new):
    if x.ndim < 3:
        return F.layer_norm(x, x.shape[-1:], new(x.shape[-1]), new(x.shape[-1]))
    channels = x.shape[1]
    how = draw.choice([F.instance_norm, F.batch_norm, F.group_norm])
    if how is F.group_norm:
        return how(x, 1, new(channels), new(channels))
    statistics = torch.full((channels,), 0.3), torch.full((channels,), 1.5)
    if how is F.instance_norm and x[0, 0].numel() == 1:
        return x
    options = {"use_input_stats": True} if how is F.instance_norm else {}
    return how(x, *statistics, new(channels), new(channels), **options)


def over_a_dimension(draw, x, new):
    dim = draw.randrange(x.ndim)
    how = draw.choice([
        lambda: x.softmax(dim),
        lambda: x.cumsum(dim).sin(),
        lambda: x + x.square().mean(dim, keepdim=True),
        lambda: x * x.logsumexp(dim).unsqueeze(dim),
        lambda: x.square().sum(dim).unsqueeze(dim).expand(x.shape) * x,
        lambda: x - 0.5 * x.amax(dim, keepdim=True),
        lambda: x.sort(dim).values,
    ])
    return how()


def places(draw, x, new):
    dim, other = draw.randrange(x.ndim), draw.randrange(x.ndim)
    turned = torch.arange(x.shape[0]).flip(0)
    how = draw.choice([
        lambda: x.flip(dim),
        lambda: x.transpose(dim, other),
        lambda: torch.cat(x.split([1, x.shape[dim] - 1], dim)[:: draw.choice([1, -1])], dim),
        lambda: torch.stack(x.unbind(dim), other),
        lambda: x[torch.arange(x.shape[0])],
        lambda: x[turned],
        lambda: F.pad(x, [1, -1] + [0] * (2 * dim)),
        lambda: x.gather(dim, torch.zeros_like(x, dtype=torch.long)) + x,
    ])
    return how()


def affine(draw, x, new):
    shape = [n if draw.random() < 0.5 else 1 for n in x.shape][draw.randrange(x.ndim) :]
    return x * new(*shape) - new(*shape)


STEPS = [
    lambda draw, x, new: x.flatten(dim - 1, dim) if (dim := draw.randrange(x.ndim)) else x,
    cut,
    lambda draw, x, new: x.permute(draw.sample(range(x.ndim), x.ndim)),
    *(affine, linear, linear),
    lambda draw, x, new: new(*x.shape[:1] * 2) @ x if x.ndim == 2 else x @ new(x.shape[-1], 2),
    convolve,
    *(normalise, over_a_dimension, places, places),
    lambda draw, x, new: x @ x.mT @ x / 4 if x.ndim == 3 else x.tanh(),  # attention
]


class Chain(nn.Module):
    """A random chain that the seed determines."""

    def __init__(self, seed):
        super().__init__()
        self.seed, self.weights = seed, nn.ParameterList()

    def forward(self, x):
        draw = random.Random(self.seed)

        def new(*shape):
            self.weights.append(nn.Parameter(0.3 + torch.rand(*shape)))
            return self.weights[-1]

        for _ in range(draw.randint(3, 9)):
            x = draw.choice(STEPS)(draw, x, new)
        return linear(draw, x, new).sin()


@pytest.mark.parametrize("seed", range(120))
def test_random_chains(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = Chain(seed)
    found = model(torch.randn(draw.choice([(N, N), (N, N, N), (N, 2, N)])))
    dim = draw.randrange(found.ndim)
    rows = found.movedim(dim, 0).reshape(found.shape[dim], -1)
    output = rows[:, :2] if draw.random() < 0.5 else rows.square().sum(1)
    expected = by_jacobian(output, list(model.parameters()))
    assert_equal(Engine(model).compute_gramian(output), expected)
    with contextlib.suppress(InputError):  # of statistics over samples
        found = Engine(model, batch_dim=0).compute_gramian(output)
        assert_equal(found, expected)

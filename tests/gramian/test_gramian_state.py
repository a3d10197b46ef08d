"""An engine changes neither graphs nor gradients, and keeps nothing in memory."""

import gc
import re
import resource

import pytest
import torch
from torch import nn
from workspace import REPOSITORY

from trak_core.gramian import Engine

BATCH_DIMS = pytest.mark.parametrize("batch_dim", [None, 0])


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Dropout(), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)
    )


@pytest.fixture
def losses(model):
    inputs = torch.randn(6, 1, 5, 5)
    return lambda: nn.functional.cross_entropy(
        model(inputs), torch.tensor([0, 1, 2, 3, 0, 1]), reduction="none"
    )


@BATCH_DIMS
def test_backward_afterwards_gives_what_it_would_have_given(batch_dim, model, losses):
    engine = Engine(model, batch_dim=batch_dim)
    torch.manual_seed(3)
    output = losses()
    weights = engine.compute_gramian(output).sum(1)
    assert all(p.grad is None for p in model.parameters())
    output.backward(weights)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    losses().backward(weights)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


@BATCH_DIMS
def test_memory_stays_flat_over_fifty_passes(batch_dim):
    # 2 MiB of activations a pass: anything kept shows, and Python's tensors are counted.
    model = nn.Sequential(nn.Linear(16, 2**13), nn.Tanh(), nn.Linear(2**13, 1))
    inputs = torch.randn(8 if batch_dim is None else 64, 16)
    engine = Engine(model, batch_dim=batch_dim)
    tensors, peaks = [], []
    gc.disable()
    try:
        for i in range(50):
            engine.compute_gramian(model(inputs).squeeze(1))
            if i in {9, 49}:
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
                gc.collect()
                tensors.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    finally:
        gc.enable()
    assert tensors[1] == tensors[0]
    assert peaks[1] - peaks[0] < 16 * 2**10


def test_graphs_deeper_than_the_stack():
    layer = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    for _ in range(1500):
        x = layer(x).tanh()
    assert Engine(layer, batch_dim=0).compute_gramian(x.sum(1)).shape == (3, 3)


def test_the_example_of_its_page():
    page = (REPOSITORY / "docs/how-to/gramian.md").read_text()
    (code,) = re.findall(r"^```python gramian\.py\n(.*?)^```", page, flags=re.S | re.M)
    names = {}
    exec(code, names)
    assert names["gramian"].shape == (16, 16)
    gradient = torch.cat([p.grad.flatten() for p in names["model"].parameters()])
    scale = names["gramian"].diagonal().rsqrt()
    expected = float((scale[:, None] * names["gramian"] * scale).sum())
    assert float(gradient.square().sum()) == pytest.approx(expected, rel=1e-4)

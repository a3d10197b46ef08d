"""The engine against the full Jacobian, and against the peer, on one quirk at a time."""

import pytest
import torch
from architectures import ARCHITECTURES
from torch import nn

from trak_core.errors import InputError
from trak_core.gramian import Engine


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(*modules):
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def by_jacobian(output, parameters):
    """The definition, one entry of the output at a time."""
    rows = []
    for entry in output.flatten():
        found = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat([
                (torch.zeros_like(p) if g is None else g).flatten()
                for p, g in zip(parameters, found, strict=True)
            ])
        )
    jacobian = torch.stack(rows)
    n = output.ndim
    gramian = (jacobian @ jacobian.T).view(*output.shape, *output.shape)
    return gramian.permute(*range(n), *reversed(range(n, 2 * n)))


def assert_equal(found, expected):
    assert found.shape == expected.shape
    scale = float(expected.abs().max())
    assert scale > 0
    assert float((found - expected).abs().max()) <= 1e-9 * scale


def run(name, entries):
    """Make an architecture, call it, and give a few entries a sample, or one loss."""
    architecture = ARCHITECTURES[name]
    model, inputs, kwargs = architecture.make(), architecture.inputs(), architecture.kwargs()

    def call():
        found = architecture.output(model(*inputs, **kwargs)).flatten(1)
        weights = torch.arange(1.0, 1 + found.shape[1]).sqrt()
        return found[:, :entries] if entries else (found * weights).square().sum(1)

    return model, call


@pytest.mark.parametrize("batch_dim", [None, 0])
@pytest.mark.parametrize("entries", [0, 2], ids=["losses", "entries"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gramian_is_that_of_the_jacobian(name, entries, batch_dim):
    model, call = run(name, entries)
    engine = Engine(model, batch_dim=batch_dim)
    output = call()
    assert_equal(engine.compute_gramian(output), by_jacobian(output, trained(model)))

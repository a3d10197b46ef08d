"""Gradients of samples by plain autograd, their Gramian by the engine, and their equality."""

import torch

from trak_core.gradients import as_batch
from trak_core.gradients.differentiable_model import graph_to, memory_formats_kept_apart
from trak_core.gramian import Engine
from trak_core.model_outputs.model_output import over_samples


def gramian_of(model, parameters, output, samples):
    """Return J J^T of the samples, float64."""
    batch = as_batch(samples, output)
    with graph_to(model, parameters.values()):
        values = over_samples(output.value, output.read(batch.given_to(model)), batch.labels)
    with memory_formats_kept_apart(values):
        return Engine(model, batch_dim=0).compute_gramian(values).double()


def by_autograd(model, output, inputs, labels=None):
    """Return gradients and outputs of samples: one forward and one backward pass for each alone."""
    parameters = {name: p for name, p in model.eval().named_parameters() if p.requires_grad}
    rows, values = [], []
    for i in range(len(inputs[0])):
        returned = output.read(model(*(x[i : i + 1].clone() for x in inputs)))
        value = output.value(returned[0], None if labels is None else labels[i])
        rows.append(torch.autograd.grad(value, [*parameters.values()], materialize_grads=True))
        values.append(value.detach())
    gradients = (
        torch.stack([row.to_dense() for row in column]) for column in zip(*rows, strict=True)
    )
    return dict(zip(parameters, gradients, strict=True)), torch.stack(values)


def assert_equal(found, expected):
    """Compare outputs and gradients that were formed in float64."""
    for a, b in zip(found.columns(), expected.columns(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-11, atol=1e-12)

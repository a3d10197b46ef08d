"""The Gramian of a model's per-sample gradients, by the engine, and equality of gradients."""

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


def assert_equal(found, expected):
    """Compare outputs and gradients that were formed in float64."""
    for a, b in zip(found.columns(), expected.columns(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-11, atol=1e-12)

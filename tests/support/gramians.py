"""The Gramian of a model's per-sample gradients, by the engine."""

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

"""Whole gradients of a batch, for what needs all of their entries at a time."""

from torch import nn

from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._consumers import Formed
from trak_core.gradients._method import GradientMethod
from trak_core.gradients._per_sample import PerSample, per_sample
from trak_core.model_outputs.model_output import ModelOutput


def formed_gradients(
    method: GradientMethod,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
) -> PerSample:
    """Form the gradients of a batch.

    Args:
        method: ``gradients_at_once`` or ``gradients_one_by_one``, see ``gradient_method``.
        model: As for the method.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``.

    Returns:
        Gradients, outputs and what goes with them of the batch, on its device. A parameter that f
        doesn't depend on has gradient 0.
    """
    batch = as_batch(samples, output)
    formed = Formed.zeros(parameters, len(batch))
    columns = method(model, parameters, output, batch, formed)
    return per_sample(formed.gradients, columns)

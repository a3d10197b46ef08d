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

    Example:
        >>> import torch
        >>> from trak_core.gradients import formed_gradients, gradient_method, select_parameters
        >>> from trak_core.model_outputs.table import TABLE
        >>> model, output = torch.nn.Linear(4, 3), TABLE["image_classification"].load()
        >>> parameters = select_parameters(model, None)
        >>> batch = torch.ones(5, 4), torch.tensor([0, 1, 2, 2, 0])
        >>> method = gradient_method(model, parameters, output, batch)
        >>> found = formed_gradients(method, model, parameters, output, batch)
        >>> {name: tuple(gradient.shape) for name, gradient in found.gradients.items()}
        {'weight': (5, 3, 4), 'bias': (5, 3)}
    """
    batch = as_batch(samples, output)
    formed = Formed.zeros(parameters, len(batch))
    columns = method(model, parameters, output, batch, formed)
    return per_sample(formed.gradients, columns)

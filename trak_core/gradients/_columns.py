"""What goes with each sample beside its gradient, by a forward pass alone."""

import torch
from torch import Tensor, nn

from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._per_sample import beside_gradients, in_evaluation_mode
from trak_core.model_outputs.model_output import ModelOutput


def columns_of(model: nn.Module, output: ModelOutput, samples: Samples) -> list[Tensor]:
    """Return f, prediction, loss weight and, if there is one, curvature of each sample.

    Args:
        model: On the batch's device. Used in evaluation mode, and left as it was.
        output: The model output f.
        samples: The batch, see ``as_batch``.

    Returns:
        Tensors of shape (batch,), as ``PerSample.columns`` gives them with the gradients.
    """
    batch = as_batch(samples, output)
    with in_evaluation_mode(model), torch.no_grad():
        outputs = output.read(batch.given_to(model))
        values = torch.vmap(output.value)(outputs, batch.labels)
        return [values, *beside_gradients(output, outputs, batch.labels)]

"""Per-sample gradients one by one, by plain autograd: for models that vmap cannot take."""

import torch
from torch import Tensor, nn

from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._per_sample import (
    PerSample,
    beside_gradient,
    in_evaluation_mode,
    per_sample,
)
from trak_core.model_outputs.model_output import ModelOutput


def looped_gradients(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
) -> PerSample:
    """Return what ``per_sample_gradients`` returns, to rounding, by a pass a sample.

    The model is called as it is, so that whatever autograd takes works. Measured on small ResNets
    and transformers, it takes seven to eight times as long as vmap.

    Args:
        model: On the batch's device. Used in evaluation mode, and left as it was.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``.

    Returns:
        Gradients, outputs and what goes with them of the batch, on its device.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    batch = as_batch(samples, output)
    gradients = {name: p.new_empty((len(batch), *p.shape)) for name, p in parameters.items()}
    rows: list[tuple[Tensor, ...]] = []
    with in_evaluation_mode(model), torch.enable_grad():
        for i in range(len(batch)):
            sample = batch.rows(slice(i, i + 1))
            outputs = output.read(sample.given_to(model)).squeeze(0)
            f = output.value(outputs, sample.labels[0])
            # A parameter that f doesn't depend on has gradient 0.
            found = torch.autograd.grad(f, list(parameters.values()), materialize_grads=True)
            for block, gradient in zip(gradients.values(), found, strict=True):
                block[i] = gradient
            rows.append((f.detach(), *beside_gradient(output, outputs, sample.labels[0])))
    return per_sample(gradients, [torch.stack(column) for column in zip(*rows, strict=True)])

"""Per-sample gradients one by one, by plain autograd: for models whose graph can't be read."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._consumers import SampleConsumer
from trak_core.gradients._per_sample import beside_gradient, check_graph, differentiating
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.one_pass.contributions import Dense


def gradients_one_by_one(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Hand over what ``gradients_at_once`` does, to rounding, by a pass a sample.

    The model is called as it is, so that whatever autograd takes works. A parameter's gradient is
    dropped when the consumer has taken it.

    Args:
        model: On the batch's device. Used in evaluation mode, and left as it was.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``.
        consumer: Takes the gradients.

    Returns:
        What ``PerSample.columns`` has, shape (batch,) each, on the batch's device.

    Raises:
        InputError: If no parameter leads to f.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    batch = as_batch(samples, output)
    rows: list[tuple[Tensor, ...]] = []

    def watch(parameter: Tensor, taker: SampleConsumer) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            taker.take(parameter, [Dense(gradient.detach()[None, None])])
            # Autograd keeps what a hook returns until the pass is over: next to nothing.
            return gradient.new_zeros(()).expand(parameter.shape)

        return hook

    for i in range(len(batch)):
        sample = batch.rows(slice(i, i + 1))
        with ExitStack() as stack, differentiating(model, parameters.values()):
            outputs = output.read(sample.given_to(model)).squeeze(0)
            f = output.value(outputs, sample.labels[0])
            taker = consumer.of(slice(i, i + 1))
            for parameter in parameters.values():
                stack.callback(parameter.register_hook(watch(parameter, taker)).remove)
            check_graph(f)
            torch.autograd.grad(f, list(parameters.values()), allow_unused=True)
            taker.finish()
        rows.append((f.detach(), *beside_gradient(output, outputs, sample.labels[0])))
    return [torch.stack(column) for column in zip(*rows, strict=True)]

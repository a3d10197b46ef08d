"""Per-sample gradients of a whole batch by one backward pass."""

import torch
from torch import Tensor, nn

from trak_core.gradients._batch import Batch, Samples, as_batch
from trak_core.gradients._consumers import SampleConsumer
from trak_core.gradients._one_by_one import gradients_one_by_one
from trak_core.gradients._per_sample import beside_gradients, check_graph, differentiating
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.one_pass.batched import GraphNeededError
from trak_core.one_pass.differentiate import by_samples, plan_of


class SamplesSharedError(Exception):
    """The graph doesn't say which gradient belongs to which sample."""


def gradients_at_once(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Differentiate f of each sample of a batch, and hand the gradients over as they come.

    One forward and one backward pass serve all samples, and no gradient of a weight is formed by
    them: where a parameter is used, the saved inputs and the gradient of what came out give every
    sample's gradient (see ``trak_core.one_pass``), which the consumer takes in the form it likes.
    The numbers of a sample don't depend on the other samples of its batch, to rounding.

    Args:
        model: On the batch's device. Used in evaluation mode, and left as it was.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``; first dimension = sample.
        consumer: Takes the gradients.

    Returns:
        What ``PerSample.columns`` has, shape (batch,) each, on the batch's device.

    Raises:
        InputError: If no parameter leads to f.
        SamplesSharedError: If the graph can't be read; ``gradients_one_by_one`` need not.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    batch = as_batch(samples, output)
    if len(batch) == 1:
        return gradients_one_by_one(model, parameters, output, batch, consumer)
    what = model, parameters, output, batch, consumer
    try:
        return _one_pass(*what, keep_graph=False)
    except GraphNeededError:
        pass  # and what the error holds of the first pass goes
    return _one_pass(*what, keep_graph=True)


def _one_pass(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    batch: Batch,
    consumer: SampleConsumer,
    *,
    keep_graph: bool,
) -> list[Tensor]:
    with differentiating(model, parameters.values()):
        outputs = output.read(batch.given_to(model))
        beside = beside_gradients(output, outputs, batch.labels)
        values = torch.vmap(output.value)(outputs, batch.labels)
    del outputs
    check_graph(values)
    with torch.no_grad():
        plan = plan_of(values, list(parameters.values()), 0)
        if plan is None:
            raise SamplesSharedError
        part = consumer.empty()
        by_samples(part, values, plan, 0, keep_graph=keep_graph)
        part.finish()
        consumer.add(part)
    return [values.detach(), *beside]

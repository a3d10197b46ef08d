"""Compute per-sample gradients, by one backward pass for all samples or one for each sample."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.gradients.differentiable_model import (
    check_graph,
    differentiating,
    memory_formats_kept_apart,
)
from trak_core.gradients.gradient_consumers import Formed
from trak_core.gradients.gradient_terms import Consumer, Dense
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import Samples, as_batch
from trak_core.gradients.one_pass import GraphNeededError, by_samples
from trak_core.model_outputs.model_output import (
    ModelOutput,
    OfValue,
    detached,
    of_sample,
    over_samples,
)
from trak_core.runtime.progress import notice

GradientMethod = Callable[
    [nn.Module, dict[str, nn.Parameter], ModelOutput, Samples, Consumer], list[Tensor]
]


@dataclass(frozen=True, slots=True)
class PerSample:
    """Per-sample gradients and other values of a batch for one checkpoint.

    Attributes:
        gradients: For each parameter name, the gradients of the model output f with respect to the
            parameter, shape (batch, *shape).
        outputs: The model output f, shape (batch,).
        predictions: The model's predictions, shape (batch,).
        loss_weights: -dl/df for the training loss l, which is Q in TRAK, shape (batch,).
        curvature: d2l/df2, shape (batch,), or None if the loss is not a function of f alone.
    """

    gradients: dict[str, Tensor]
    outputs: Tensor
    predictions: Tensor
    loss_weights: Tensor
    curvature: Tensor | None = None

    def columns(self) -> list[Tensor]:
        """Return outputs, predictions, loss weights and, if it is not None, the curvature."""
        columns = [self.outputs, self.predictions, self.loss_weights]
        return columns if self.curvature is None else [*columns, self.curvature]

    def blocks(self) -> list[Tensor]:
        """Return the gradients as blocks of shape (batch, entries), one for each parameter."""
        return as_blocks(self.gradients.values())


def as_blocks(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return gradients, shape (batch, *shape) each, as matrices (batch, entries) of one dtype.

    The dtype is float32, or a lower precision if all gradients have it.
    """
    blocks = [block.reshape(len(block), -1) for block in gradients]
    if len({block.dtype for block in blocks}) > 1 or blocks[0].dtype is torch.float64:
        blocks = [block.float() for block in blocks]
    return blocks


def _other_values(
    output: ModelOutput, outputs_and_value: tuple[Any, Tensor], label: Tensor
) -> tuple[Tensor, ...]:
    """Return one sample's prediction, loss weight and, if it is defined, curvature.

    ``outputs_and_value`` is the model's return value, and the model output f that was computed from
    this value. Functions of f alone (``OfValue``) use this f instead of computing it again.
    """
    outputs, value = outputs_and_value
    functions = [output.prediction or output.value, output.loss_weight]
    if output.curvature is not None:
        functions.append(output.curvature)
    return tuple(
        function.function(value.detach())
        if isinstance(function, OfValue) and function.value is output.value
        else function(detached(outputs), label)
        for function in functions
    )


def gradients_at_once(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: Consumer,
    *,
    must: bool = False,
) -> list[Tensor]:
    """Compute the gradients of the model output f for all samples by one backward pass.

    As soon as the gradients of a parameter are computed, the consumer gets them as factors. For a
    linear layer, the factors are the output gradients delta and the inputs x. The gradient of
    sample i is dW_i = sum_t delta_t x_t^T. Up to rounding, a sample's gradient doesn't depend on
    the other samples of the batch. The model runs in evaluation mode, and without vmap.

    If the model's graph doesn't allow one pass for all samples, ``gradients_one_by_one`` computes
    the gradients, and a notice is printed. With ``must``, an ``UnreadableGraphError`` is raised
    instead.

    Returns:
        The tensors of ``PerSample.columns``, shape (batch,) each, on the batch's device.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    batch = as_batch(samples, output)

    def one_pass(keep_graph: bool) -> list[Tensor]:
        with differentiating(model, parameters.values()):
            outputs = output.read(batch.given_to(model))
            values = over_samples(output.value, outputs, batch.labels)
            with torch.no_grad():
                given = detached((outputs, values))
                others = over_samples(partial(_other_values, output), given, batch.labels)
        del outputs, given
        check_graph(values)
        with torch.no_grad(), memory_formats_kept_apart(values):
            part = consumer.empty()
            by_samples(part, values, list(parameters.values()), 0, keep_graph=keep_graph)
            consumer.add(part)
        return [values.detach(), *others]

    try:
        with suppress(GraphNeededError):
            return one_pass(keep_graph=False)
        # After the ``with`` block, GraphNeededError no longer keeps the first pass's tensors alive.
        return one_pass(keep_graph=True)
    except UnreadableGraphError as error:  # raised before the consumer gets gradients
        if must:
            raise
        notice(
            "one backward pass cannot compute the gradients of a batch, because the model "
            f"{error}. Instead, autograd computes the gradients of this batch and of similar "
            "batches, one sample at a time."
        )
        return gradients_one_by_one(model, parameters, output, batch, consumer)


def gradients_in_turn(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: Consumer,
    *,
    must: bool = False,
) -> list[Tensor]:
    """Compute the gradients as ``gradients_at_once`` does, one sample after another.

    This also works for models in which an operation mixes samples, because a batch of one sample
    contains no other samples. Unlike ``gradients_one_by_one``, this function passes gradients to
    the consumer as factors, which need less memory.

    Returns:
        The tensors of ``PerSample.columns``, shape (batch,) each, on the batch's device.
    """
    batch = as_batch(samples, output)
    columns = [
        gradients_at_once(
            model, parameters, output, batch.rows(row), consumer.for_samples(row), must=must
        )
        for row in (slice(i, i + 1) for i in range(len(batch)))
    ]
    return [torch.cat(column) for column in zip(*columns, strict=True)]


# To save memory, autograd computes a gradient with more bytes than this by several backward passes,
# one for each of about ``_GROUPS`` groups of parameters.
_WHOLE_BYTES = 2**28
_GROUPS = 8


def _groups(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters into groups of limited size. A larger parameter forms a group by itself."""
    parameters = list(parameters)
    most = max(_WHOLE_BYTES, sum(p.nbytes for p in parameters) // _GROUPS)
    group: list[nn.Parameter] = []
    for parameter in parameters:
        if group and sum(p.nbytes for p in [*group, parameter]) > most:
            yield group
            group = []
        group.append(parameter)
    yield group


def gradients_one_by_one(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: Consumer,
) -> list[Tensor]:
    """Compute the gradients of each sample's model output f by ``torch.autograd.grad``.

    The results equal those of ``gradients_at_once`` up to rounding. This method works for every
    model, and calls users' backward hooks. To save memory, the gradient of a large model is
    computed by several backward passes, one for each group of parameters.

    Returns:
        The tensors of ``PerSample.columns``, shape (batch,) each, on the batch's device.
    """
    batch = as_batch(samples, output)
    rows: list[tuple[Tensor, ...]] = []
    groups = list(_groups(parameters.values()))
    for i in range(len(batch)):
        sample = batch.rows(slice(i, i + 1))
        taker = consumer.for_samples(slice(i, i + 1))
        with differentiating(model, parameters.values()):
            outputs = of_sample(output.read(sample.given_to(model)), 0, 1)
            f = output.value(outputs, sample.labels[0])
            check_graph(f)
            with memory_formats_kept_apart(f):
                for group in groups:
                    more = group is not groups[-1]
                    gradients = torch.autograd.grad(f, group, retain_graph=more, allow_unused=True)
                    for parameter, gradient in zip(group, gradients, strict=True):
                        if gradient is not None:
                            taker.take(parameter, [Dense(gradient.to_dense()[None, None])])
                    del gradients
        taker.finish()
        rows.append((f.detach(), *_other_values(output, (outputs, f), sample.labels[0])))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


# The methods by name. The pipeline stores the name of the method that it uses.
_METHODS = gradients_at_once, gradients_in_turn, gradients_one_by_one
METHODS: dict[str, GradientMethod] = {method.__name__: method for method in _METHODS}


def formed_gradients(
    method: GradientMethod,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
) -> PerSample:
    """Return the gradients of a batch as whole tensors, computed by ``method``.

    ``method`` is the result of ``gradient_method``. All tensors are on the batch's device. A
    parameter on which the model output doesn't depend has gradient 0.

    Example:
        >>> import torch
        >>> from trak_core.gradients import formed_gradients, gradient_method, select_parameters
        >>> from trak_core.model_outputs.about_outputs import TABLE
        >>> model, output = torch.nn.Linear(4, 3), TABLE["image_classification"].load()
        >>> parameters = select_parameters(model, None)
        >>> batch = torch.ones(5, 4), torch.tensor([0, 1, 2, 2, 0])
        >>> method = gradient_method(model, parameters, output, batch)
        >>> formed = formed_gradients(method, model, parameters, output, batch)
        >>> {name: tuple(gradient.shape) for name, gradient in formed.gradients.items()}
        {'weight': (5, 3, 4), 'bias': (5, 3)}
    """
    batch = as_batch(samples, output)
    formed = Formed.zeros(parameters, len(batch))
    return PerSample(formed.rows, *method(model, parameters, output, batch, formed))

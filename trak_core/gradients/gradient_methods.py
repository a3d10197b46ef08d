"""Compute per-sample gradients: by one backward pass for all samples, or by one each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.gradients.differentiable_model import (
    check_graph,
    differentiating,
    in_evaluation_mode,
    memory_formats_kept_apart,
)
from trak_core.gradients.gradient_consumers import Formed, SampleConsumer
from trak_core.gradients.gradient_terms import Dense
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import Samples, as_batch
from trak_core.gradients.one_pass import GraphNeededError, by_samples, plan_of
from trak_core.gradients.sample_owner_rules import MixedSamplesError
from trak_core.model_outputs.model_output import (
    ModelOutput,
    OfValue,
    detached,
    of_sample,
    over_samples,
)

GradientMethod = Callable[
    [nn.Module, dict[str, nn.Parameter], ModelOutput, Samples, SampleConsumer], list[Tensor]
]


class SamplesSharedError(Exception):
    """The graph doesn't say which gradient belongs to which sample."""


# A batch's graph that one pass can't read, before any gradient was handed over.
UNREADABLE = (SamplesSharedError, UnreadableGraphError, MixedSamplesError)


@dataclass(frozen=True, slots=True)
class PerSample:
    """Whole gradients and the other values of a batch under one checkpoint.

    Attributes:
        gradients: df/dtheta, one (batch, *shape) tensor a parameter, in order.
        outputs: f, shape (batch,).
        predictions: Shape (batch,).
        loss_weights: Q, shape (batch,).
        curvature: W, shape (batch,); None where the model output has none.
    """

    gradients: dict[str, Tensor]
    outputs: Tensor
    predictions: Tensor
    loss_weights: Tensor
    curvature: Tensor | None

    def columns(self) -> list[Tensor]:
        """Return outputs, predictions, loss weights and, if there is one, curvature."""
        columns = [self.outputs, self.predictions, self.loss_weights]
        return columns if self.curvature is None else [*columns, self.curvature]

    def blocks(self) -> list[Tensor]:
        """Return the gradients, one (batch, entries) block a parameter, without a copy."""
        return as_blocks(self.gradients.values())


def as_blocks(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return (batch, *shape) tensors as (batch, entries) blocks of one dtype, float32 at most."""
    blocks = [block.reshape(len(block), -1) for block in gradients]
    if len({block.dtype for block in blocks}) > 1 or blocks[0].dtype is torch.float64:
        blocks = [block.float() for block in blocks]
    return blocks


def per_sample(gradients: dict[str, Tensor], columns: Sequence[Tensor]) -> PerSample:
    """Combine gradients with f and the values of ``beside_gradient``, in that order."""
    outputs, predictions, loss_weights, *curvature = columns
    return PerSample(gradients, outputs, predictions, loss_weights, *curvature or [None])


def beside_gradient(
    output: ModelOutput, outputs: Any, label: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Return prediction, loss weight and, if there is one, curvature of one sample.

    ``value`` is f, which need not be computed again for functions of it.
    """
    functions = [output.prediction or output.value, output.loss_weight]
    if output.curvature is not None:
        functions.append(output.curvature)
    return tuple(
        function.function(value.detach())
        if isinstance(function, OfValue) and function.value is output.value
        else function(detached(outputs), label)
        for function in functions
    )


def beside_gradients(
    output: ModelOutput, outputs: Any, labels: Tensor, values: Tensor
) -> tuple[Tensor, ...]:
    """Return ``beside_gradient`` of all samples, shape (batch,) each."""

    def beside(pair: tuple[Any, Tensor], label: Tensor) -> tuple[Tensor, ...]:
        return beside_gradient(output, pair[0], label, pair[1])

    with torch.no_grad():
        return over_samples(beside, (detached(outputs), values.detach()), labels)


def columns_of(model: nn.Module, output: ModelOutput, samples: Samples) -> list[Tensor]:
    """Return ``PerSample.columns``, shape (batch,) each, of a model in evaluation mode."""
    batch = as_batch(samples, output)
    with in_evaluation_mode(model), torch.no_grad():
        outputs = output.read(batch.given_to(model))
        values = over_samples(output.value, outputs, batch.labels)
        return [values, *beside_gradients(output, outputs, batch.labels, values)]


def gradients_at_once(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
    *,
    must: bool = False,
) -> list[Tensor]:
    """Differentiate f of each sample of a batch, and hand the gradients over as they come.

    One forward and one backward pass serve all samples, and form no gradient of a weight. Where a
    parameter is used, the saved inputs and the gradient of the operation's output give every
    sample's gradient (see ``trak_core.gradients``), which the consumer takes in the form it likes.
    The numbers of a sample don't depend on the other samples of its batch, to rounding. The model
    is used in evaluation mode, and a parameter must lead to f.

    A batch whose graph can't be read goes to ``gradients_one_by_one``, which standard output says.
    With ``must``, one of ``UNREADABLE`` is raised in place of that.

    Returns:
        The tensors of ``PerSample.columns``, shape (batch,) each, on the batch's device.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    batch = as_batch(samples, output)

    def one_pass(keep_graph: bool) -> list[Tensor]:
        with differentiating(model, parameters.values()):
            outputs = output.read(batch.given_to(model))
            values = over_samples(output.value, outputs, batch.labels)
            beside = beside_gradients(output, outputs, batch.labels, values)
        del outputs
        check_graph(values)
        with torch.no_grad(), memory_formats_kept_apart(values):
            plan = plan_of(values, list(parameters.values()), 0)
            if plan is None:
                raise SamplesSharedError("the samples share what leads to the model output")
            part = consumer.empty()
            by_samples(part, values, plan, 0, keep_graph=keep_graph)
            part.finish()
            consumer.add(part)
        return [values.detach(), *beside]

    try:
        return one_pass(keep_graph=False)
    except GraphNeededError:
        pass  # frees the tensors of the first pass, which the error holds
    except UNREADABLE as error:
        if must:
            raise
        _say_once(str(error) or type(error).__name__)
        return gradients_one_by_one(model, parameters, output, batch, consumer)
    return one_pass(keep_graph=True)


def gradients_in_turn(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Return and hand over what ``gradients_at_once`` does, by a pass a sample.

    What isn't made of parameters alone belongs to the sample, so that no operation hides it.
    """
    batch = as_batch(samples, output)
    columns = [
        gradients_at_once(
            model, parameters, output, batch.rows(slice(i, i + 1)), consumer.of(slice(i, i + 1))
        )
        for i in range(len(batch))
    ]
    return [torch.cat(column) for column in zip(*columns, strict=True)]


@cache
def _say_once(reason: str) -> None:
    said = f"Notice: one backward pass cannot take a batch ({reason}). Its gradients, and those of"
    print(f"{said} others like it, are computed by autograd, one sample at a time.", flush=True)


# A whole gradient of more bytes is computed in groups of parameters.
_WHOLE_BYTES = 2**28
_GROUPS = 8


def _groups(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut parameters into groups that have a limited size, or one member."""
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
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Return and hand over what ``gradients_at_once`` does, to rounding, by a pass a sample.

    It is plain autograd, ``torch.autograd.grad(f, parameters)``, so that it works for everything
    that autograd takes, and hooks of the user's change gradients as they do there. A large model
    takes a pass for each of several groups of parameters, of which one is in memory at a time.
    """
    batch = as_batch(samples, output)
    rows: list[tuple[Tensor, ...]] = []
    groups = list(_groups(parameters.values()))
    for i in range(len(batch)):
        sample = batch.rows(slice(i, i + 1))
        taker = consumer.of(slice(i, i + 1))
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
        rows.append((f.detach(), *beside_gradient(output, outputs, sample.labels[0], f)))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


# The ways by name, as a run's record has them.
METHODS: dict[str, GradientMethod] = {
    "gradients_at_once": gradients_at_once,
    "gradients_in_turn": gradients_in_turn,
    "gradients_one_by_one": gradients_one_by_one,
}


def formed_gradients(
    method: GradientMethod,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
) -> PerSample:
    """Form the gradients of a batch as a whole, by a method from ``gradient_method``.

    Returns:
        Gradients, outputs and the other columns of the batch, on its device. A parameter that f
        doesn't depend on has gradient 0.

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
    columns = method(model, parameters, output, batch, formed)
    return per_sample(formed.rows, columns)

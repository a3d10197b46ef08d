"""Choose and run a way to per-sample gradients: one backward pass for all samples, or one each."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from trak_core.autograd.contributions import Dense
from trak_core.autograd.layout_rules import MixedSamplesError
from trak_core.autograd.one_pass import GraphNeededError, by_samples, plan_of
from trak_core.errors import InputError
from trak_core.gradients.consumers import Digest, Formed, SampleConsumer
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, rounding
from trak_core.gradients.per_sample import (
    PerSample,
    beside_gradient,
    beside_gradients,
    check_graph,
    differentiating,
    in_evaluation_mode,
    per_sample,
)
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.system.out_of_memory import is_out_of_memory

GradientMethod = Callable[
    [nn.Module, dict[str, nn.Parameter], ModelOutput, Samples, SampleConsumer], list[Tensor]
]


class SamplesSharedError(Exception):
    """The graph doesn't say which gradient belongs to which sample."""


def gradient_method(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, samples: Samples
) -> GradientMethod:
    """Compare one pass for the first two samples with plain autograd, and choose the method.

    Returns:
        ``gradients_at_once``, or ``gradients_one_by_one`` where the first cannot read the model's
        graph, would be slower, or gives other numbers. Then a printed line says why.
    """
    if len(as_batch(samples, output)) < 2:
        return gradients_one_by_one
    reason = why_not_at_once(model, parameters, output, samples)
    if reason is None:
        return gradients_at_once
    print(
        f"Notice: one backward pass for all samples cannot take this model; it {reason}. Gradients "
        "are computed one sample at a time, with the same numbers but slower.",
        flush=True,
    )
    return gradients_one_by_one


def why_not_at_once(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, samples: Samples
) -> str | None:
    """Return why one pass for two samples or more cannot take a model, in words; None if it can."""
    pair = as_batch(samples, output).rows(slice(0, 2))
    try:
        return _hiding_operations(model, parameters, output, pair) or _difference(
            model, parameters, output, pair
        )
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return None
        return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _difference(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, pair: Batch
) -> str | None:
    """Compare the gradients of two samples with those of plain autograd."""
    at_once, one_by_one = (Digest.zeros(parameters, len(pair)) for _ in range(2))
    gradients_one_by_one(model, parameters, output, pair, one_by_one)
    gradients_at_once(model, parameters, output, pair, at_once)
    digests = [(at_once.rows[name], b) for name, b in one_by_one.rows.items() if b.numel()]
    if any((b.isfinite() & ~a.isfinite()).any() for a, b in digests):
        return "gives NaN or infinity where autograd doesn't"
    largest = max(float(b.abs().max()) for _, b in digests)
    difference = max(float((a - b).abs().max()) for a, b in digests)
    difference = difference / largest if largest > 0 else difference
    with in_evaluation_mode(model):
        allowed = rounding(model, pair)
    # The check of features explains NaN in both, with sample and parameter.
    if difference != difference or difference <= allowed:
        return None
    return f"differs from autograd by {difference:.1g} of the largest entry"


def _hiding_operations(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, pair: Batch
) -> str | None:
    """Return the operations below which samples can't be told apart, in words; None if all can.

    A tensor that depends on parameters alone has the same shape for two samples and for three.
    """
    arrivals = []
    for n in (2, 3):
        batch = pair.rows(torch.arange(n) % 2)
        with differentiating(model, parameters.values()):
            values = torch.vmap(output.value)(output.read(batch.given_to(model)), batch.labels)
        check_graph(values)
        try:
            plan = plan_of(values, list(parameters.values()), 0)
        except MixedSamplesError:
            plan = None
        if plan is None:
            raise SamplesSharedError("the samples share what leads to the model output")
        arrivals.append(plan.arrivals())
        del values, plan  # before the next
    two, three = arrivals
    if two == three:
        return None
    names = [name for (name, a), (_, b) in zip(two, three, strict=False) if a != b]
    return f"cannot tell samples apart below: {', '.join(dict.fromkeys(names))}"


def gradients_at_once(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Differentiate f of each sample of a batch, and hand the gradients over as they come.

    One forward and one backward pass serve all samples, and form no gradient of a weight. Where a
    parameter is used, the saved inputs and the gradient of the operation's output give every
    sample's gradient (see ``trak_core.autograd``), which the consumer takes in the form it likes.
    The numbers of a sample don't depend on the other samples of its batch, to rounding. The model
    is used in evaluation mode, and a parameter must lead to f.

    Returns:
        The tensors of ``PerSample.columns``, shape (batch,) each, on the batch's device.

    Raises:
        SamplesSharedError: If the graph can't be read, which ``gradients_one_by_one`` doesn't need.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    batch = as_batch(samples, output)
    if len(batch) == 1:
        return gradients_one_by_one(model, parameters, output, batch, consumer)

    def one_pass(keep_graph: bool) -> list[Tensor]:
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

    try:
        return one_pass(keep_graph=False)
    except GraphNeededError:
        pass  # frees the tensors of the first pass, which the error holds
    return one_pass(keep_graph=True)


def gradients_one_by_one(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Return and hand over what ``gradients_at_once`` does, to rounding, by a pass a sample.

    The model is called as it is, so that it works for everything that autograd takes. A parameter's
    gradient is dropped when the consumer has taken it.
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
        >>> from trak_core.model_outputs.table import TABLE
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

"""Ways to per-sample gradients: one backward pass for all samples, or one pass a sample."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.autograd.contributions import Dense
from trak_core.autograd.layout_rules import MixedSamplesError
from trak_core.autograd.one_pass import GraphNeededError, by_samples, plan_of
from trak_core.errors import InputError
from trak_core.gradients.batch import Batch, Samples, as_batch, rounding
from trak_core.gradients.consumers import Digest, Formed, Magnitude, SampleConsumer
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
from trak_core.system.job import is_out_of_memory


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


def check_finite(result: PerSample, sample_ids: Sequence[object]) -> None:
    """Stop at NaN or infinity in whole gradients.

    Args:
        result: What a batch gave.
        sample_ids: The batch's ids, for the message.

    Raises:
        InputError: Naming the samples and the parameters.
    """
    bad = {
        name: ~torch.isfinite(block.reshape(len(block), -1)).all(dim=1)
        for name, block in result.gradients.items()
    }
    dtypes = {block.dtype for block in result.gradients.values()}
    _refuse_bad(~torch.isfinite(result.outputs), bad, dtypes, sample_ids)


def explain_not_finite(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    sample_ids: Sequence[object],
) -> None:
    """Differentiate a batch once more, slowly, to say where NaN or infinity comes from.

    Args:
        model: As for ``gradients_one_by_one``.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``.
        sample_ids: Its ids, for the message.

    Raises:
        InputError: Naming the samples and the parameters; none if all gradients are finite.
    """
    batch = as_batch(samples, output)
    sums = Magnitude.zeros(parameters, len(batch))
    outputs, *_ = gradients_one_by_one(model, parameters, output, batch, sums)
    bad = {name: ~torch.isfinite(of_each) for name, of_each in sums.rows.items()}
    dtypes = {parameter.dtype for parameter in parameters.values()}
    _refuse_bad(~torch.isfinite(outputs), bad, dtypes, sample_ids)


def _refuse_bad(
    bad: Tensor,
    by_parameter: Mapping[str, Tensor],
    dtypes: Collection[torch.dtype],
    sample_ids: Sequence[object],
) -> None:
    names = ["the model output itself"] if bad.any() else []
    for name, rows in by_parameter.items():
        if rows.any():
            names.append(name)
            bad = bad | rows
    if names:
        found = [sample_ids[i] for i in bad.nonzero().flatten().tolist()]
        overflow = (
            " float16 ends at 65504: bfloat16 or float32 weights reach further."
            if torch.float16 in dtypes
            else ""
        )
        raise InputError(
            "Per-sample gradients must be finite. Found NaN or infinity for the samples "
            f"{', '.join(map(str, found[:8]))}{' and more' if len(found) > 8 else ''} in "
            f"{', '.join(names[:8])}{' and more' if len(names) > 8 else ''}. Look for bad values "
            f"in these samples and in the checkpoint; an infinite score would hide them.{overflow}",
            code="gradients.not_finite",
        )


def refuse_not_finite(sample_ids: Sequence[object], what: str) -> None:
    """Stop at numbers that are not finite.

    Args:
        sample_ids: Of the samples they belong to.
        what: What they are, at the beginning of a sentence.

    Raises:
        InputError: Always; it names the samples.
    """
    found = list(dict.fromkeys(map(str, sample_ids)))
    raise InputError(
        f"{what} must be finite. Found NaN or infinity for the samples {', '.join(found[:8])}"
        f"{' and more' if len(found) > 8 else ''}. Look for bad values in these samples and in the "
        "checkpoint; an infinite score would hide them.",
        code="gradients.values_not_finite",
    )


def check_finite_gramian(
    gramian: np.ndarray, row_ids: Sequence[object], ids: Sequence[object]
) -> None:
    """Refuse a Gramian with NaN or infinity: a bad gradient fills its whole row or column.

    Args:
        gramian: Inner products of gradients, shape (n, m).
        row_ids: Of the n samples.
        ids: Of the m samples.

    Raises:
        InputError: It names the samples.
    """
    bad = ~np.isfinite(gramian)
    if bad.any():
        rows, columns = (np.flatnonzero(bad.all(axis=axis)).tolist() for axis in (1, 0))
        if not (rows or columns):  # too large for each other alone
            rows = np.flatnonzero(bad.any(axis=1)).tolist()
        found = [row_ids[i] for i in rows] + [ids[i] for i in columns]
        refuse_not_finite(found, "Inner products of gradients")


GradientMethod = Callable[
    [nn.Module, dict[str, nn.Parameter], ModelOutput, Samples, SampleConsumer], list[Tensor]
]


def gradient_method(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, samples: Samples
) -> GradientMethod:
    """Try one pass for two samples beside plain autograd, and say so if it cannot take the model.

    Args:
        model: On the samples' device.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: Some samples, see ``as_batch``; the first two count.

    Returns:
        ``gradients_at_once``, or ``gradients_one_by_one`` where the first cannot read the model's
        graph, would be slower, or gives other numbers; a line is printed then, with the reason.

    Raises:
        InputError: If no parameter leads to f.
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
    """Return why one pass for several samples cannot take a model, in words; None if it can.

    Args:
        model: On the samples' device.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: Two samples or more, see ``as_batch``; the first two count.

    Raises:
        InputError: If no parameter leads to f.
    """
    few = as_batch(samples, output).rows(slice(0, 2))
    what = model, parameters, output
    try:
        return _hidden(*what, few) or _difference(*what, few)
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return None
        return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _difference(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, few: Batch
) -> str | None:
    """Compare the gradients of two samples with those of plain autograd."""
    chosen = list(parameters.values())
    found, expected = (Digest.zeros(chosen, len(few)) for _ in range(2))
    gradients_one_by_one(model, parameters, output, few, expected)
    gradients_at_once(model, parameters, output, few, found)
    pairs = [(a, b) for a, b in zip(found.rows, expected.rows, strict=True) if b.numel()]
    if any((b.isfinite() & ~a.isfinite()).any() for a, b in pairs):
        return "gives NaN or infinity where autograd doesn't"
    largest = max(float(b.abs().max()) for _, b in pairs)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    difference = difference / largest if largest > 0 else difference
    with in_evaluation_mode(model):
        allowed = rounding(model, few)
    # NaN in both is for the check of features to explain, with sample and parameter.
    if difference != difference or difference <= allowed:
        return None
    return f"differs from autograd by {difference:.1g} of the largest entry"


def _hidden(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, few: Batch
) -> str | None:
    """Return the operations below which samples can't be told apart, in words, if there are any.

    What depends on parameters alone has the same shape for two samples and for three.

    Returns:
        The reason; None for none.
    """
    found = []
    for n in (2, 3):
        batch = few.rows(torch.arange(n) % 2)
        with differentiating(model, parameters.values()):
            values = torch.vmap(output.value)(output.read(batch.given_to(model)), batch.labels)
        check_graph(values)
        try:
            plan = plan_of(values, list(parameters.values()), 0)
        except MixedSamplesError:
            plan = None
        if plan is None:
            raise SamplesSharedError("the samples share what leads to the model output")
        found.append(plan.arrivals())
        del values, plan  # before the next
    of_two, of_three = found
    if of_two == of_three:
        return None
    names = [name for (name, a), (_, b) in zip(of_two, of_three, strict=False) if a != b]
    return f"cannot tell samples apart below: {', '.join(dict.fromkeys(names))}"


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

"""How a model's gradients are to be computed: all samples at once, or one by one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients._at_once import SamplesSharedError, gradients_at_once
from trak_core.gradients._batch import Batch, Samples, as_batch
from trak_core.gradients._consumers import Digest, SampleConsumer
from trak_core.gradients._one_by_one import gradients_one_by_one
from trak_core.gradients._per_sample import check_graph, differentiating, in_evaluation_mode
from trak_core.gradients._precision import rounding
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.one_pass.differentiate import plan_of
from trak_core.one_pass.rules import MixedSamplesError
from trak_core.system.faults import is_out_of_memory

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

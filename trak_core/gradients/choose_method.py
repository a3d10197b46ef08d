"""Choose the way to a model's per-sample gradients, by what it gives for two samples."""

import copy
import math
from collections import Counter
from contextlib import suppress

import torch
from torch import nn

from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients.differentiable_model import (
    check_graph,
    differentiating,
    in_evaluation_mode,
    n_params,
)
from trak_core.gradients.gradient_consumers import Digest
from trak_core.gradients.gradient_methods import (
    GradientMethod,
    SamplesSharedError,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
)
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, least_rounding, rounding
from trak_core.gradients.one_pass import plan_of
from trak_core.gradients.sample_owner_rules import MixedSamplesError
from trak_core.model_outputs.model_output import ModelOutput, over_samples

# With fewer parameters plain autograd, whose gradients stay in a core's caches, is rarely slower
# than a pass by factors for each sample (RESULTS.md, "Ways to gradients").
_LEAST_PARAMETERS = 8_000_000
# So much larger, in units of the last place, is another kind of difference.
_FAR = 10

_Given = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]


def gradient_method(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    *,
    reads_terms: bool = False,
) -> GradientMethod:
    """Return the method of ``choose_method``, and print its notice."""
    given = model, parameters, output, samples
    method, notice = choose_method(*given, reads_terms=reads_terms)
    if notice is not None:
        print(f"Notice: {notice}", flush=True)
    return method


def choose_method(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    *,
    reads_terms: bool = False,
) -> tuple[GradientMethod, str | None]:
    """Compare the gradients of the first two samples, and of the first alone, with autograd's.

    Args:
        model: It may be in any mode.
        parameters: Those to differentiate.
        output: The model output f.
        samples: Two, or one.
        reads_terms: Whether gradients are wanted as factors, however few entries they have.

    Returns:
        ``gradients_at_once``, if it gives what plain autograd does, to rounding.
        ``gradients_in_turn``, if that does, where samples can't be told apart, or there is one; but
        not where they can't, the model is small and nothing ``reads_terms``. Plain autograd,
        ``gradients_one_by_one``, everywhere else. And a notice why, or None.
    """
    pair = as_batch(samples, output).rows(slice(0, 2))
    given = model, parameters, output, pair
    hidden, said, is_right, method = None, None, True, gradients_in_turn
    is_small = n_params(parameters) < _LEAST_PARAMETERS and not reads_terms
    try:
        hidden = _hiding_operations(*given) if len(pair) > 1 else None
        if len(pair) > 1 and hidden is None:
            method = gradients_at_once
        elif hidden is not None and is_small:
            method = gradients_one_by_one
        if method is not gradients_one_by_one:
            is_right, said = _compare(given, method)
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return gradients_at_once, (
                "memory ran out where one backward pass for all samples was compared with "
                "autograd. The pass is taken without that"
            )
        is_unread = isinstance(error, UnreadableGraphError)
        is_right, said = False, str(error) if is_unread else f"fails: {_in_short(error)}"
    if is_right and hidden is None:
        return method, said and f"one backward pass for all samples {said}."
    return method if is_right else gradients_one_by_one, (
        "one backward pass for all samples cannot take this model; it "
        f"{'; it '.join(filter(None, (hidden, said)))}. Gradients are computed one sample at a "
        "time, with the same numbers but slower."
    )


def _compare(given: _Given, method: GradientMethod) -> tuple[bool, str | None]:
    """Return whether a way gives what plain autograd does, to rounding, and what to say of it.

    Float32 may round a ReLU's input, say, to the other side of 0. In float64 the ways are much
    nearer then, in units of the last place. Formulas that lose digits lose as many there.
    """
    model, *_, pair = given
    plain, allowed = _digest(given, gradients_one_by_one), least_rounding(model)
    for n in range(len(pair), 0, -1):
        first = *given[:3], pair.rows(slice(0, n))
        apart, name = _digest(first, method).difference(plain.of(slice(0, n)))
        if apart > allowed:
            with in_evaluation_mode(model):
                allowed = rounding(model, pair)
        if not apart > allowed:
            continue  # the check of features explains NaN in both, with sample and parameter
        if apart == math.inf:
            return False, f"gives NaN or infinity where autograd doesn't, in {name}"
        said = f"differs from autograd by {apart:.1g} of the largest entry, in {name}"
        try:
            exact, exact_name = _apart_in_float64(first, method)
        except Exception as error:
            return False, f"{said}; in float64 that can't be told ({_in_short(error)})"
        said = f"{said}; in float64 by {exact:.1g}"
        eps = torch.finfo(torch.float64).eps
        if exact <= min(eps * apart / least_rounding(model) ** 2 / _FAR, math.sqrt(eps)):
            return True, f"{said}, so that it is a matter of rounding"
        return False, f"{said}, in {exact_name}"
    return True, None


def _apart_in_float64(given: _Given, method: GradientMethod) -> tuple[float, str]:
    """Return the largest difference from plain autograd in float64, and its parameter's name."""
    model, parameters, output, pair = given
    copies: dict[int, nn.Parameter] = {}
    twin = copy.deepcopy(model, copies).double()
    own = {name: copies[id(parameter)] for name, parameter in parameters.items()}
    exact = twin, own, output, pair.mapped(lambda x: x.double() if x.is_floating_point() else x)
    return _digest(exact, method).difference(_digest(exact, gradients_one_by_one))


def _digest(given: _Given, method: GradientMethod) -> Digest:
    model, parameters, output, pair = given
    digest = Digest.zeros(parameters, len(pair))
    if method is gradients_one_by_one:
        method(*given, digest)
        return digest
    n = len(pair) if method is gradients_at_once else 1
    for rows in (slice(i, i + n) for i in range(0, len(pair), n)):
        own = model, parameters, output, pair.rows(rows)
        gradients_at_once(*own, digest.of(rows), must=True)
    return digest


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _hiding_operations(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, pair: Batch
) -> str | None:
    """Return the operations below which samples can't be told apart, in words; None if all can.

    Tensors that depend on parameters alone are as many, of the same shapes, for two samples and
    for three.
    """
    arrivals: list[Counter[tuple[str, tuple[int, ...]]]] = []
    for n in (2, 3):
        batch = pair.rows(torch.arange(n) % 2)
        with differentiating(model, parameters.values()):
            outputs = output.read(batch.given_to(model))
            values = over_samples(output.value, outputs, batch.labels)
        check_graph(values)
        plan = None
        with suppress(MixedSamplesError):
            plan = plan_of(values, list(parameters.values()), 0)
        if plan is None:
            raise SamplesSharedError("the samples share what leads to the model output")
        arrivals.append(Counter(plan.arrivals()))
        del outputs, values, plan  # before the next
    two, three = arrivals
    names = dict.fromkeys(name for name, _ in [*(two - three), *(three - two)])
    return f"cannot tell samples apart below: {', '.join(names)}" if names else None

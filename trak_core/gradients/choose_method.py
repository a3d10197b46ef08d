"""Choose how to compute a model's per-sample gradients, by a comparison on two samples."""

import copy
import math
from collections import Counter

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
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
)
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import (
    Batch,
    Samples,
    as_batch,
    call_with_rounding,
    least_rounding,
)
from trak_core.gradients.one_pass import plan_of
from trak_core.model_outputs.model_output import ModelOutput, over_samples
from trak_core.runtime.progress import print_line

# Below this number of parameters, plain autograd for each sample is rarely slower than
# ``gradients_in_turn`` (RESULTS.md, "Ways to gradients"), because gradients fit into CPU caches.
_LEAST_PARAMETERS = 8_000_000
# From float32 to float64, rounding errors shrink by about the ratio of the two machine epsilons. A
# difference counts as a rounding error if it shrinks by at least this ratio divided by ``_FAR``.
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
    """Return the method that ``choose_method`` returns, and print its notice if there is one."""
    method, notice = choose_method(model, parameters, output, samples, reads_terms=reads_terms)
    if notice is not None:
        print_line(f"Notice: {notice}")
    return method


def choose_method(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    *,
    reads_terms: bool = False,
) -> tuple[GradientMethod, str | None]:
    """Choose the fastest method whose gradients of the first two samples equal those of autograd.

    ``reads_terms`` says whether the consumer of the gradients reads the terms of single tokens.
    Plain autograd doesn't compute these terms.

    Returns:
        The method, and a notice that explains the choice, or None. Usually, the method is
        ``gradients_at_once``. It is ``gradients_in_turn`` if there is only one sample, or if an
        operation mixes samples. It is ``gradients_one_by_one``, which calls autograd for each
        sample, in three cases: the graph can't be read, the other methods' gradients differ by more
        than rounding errors, or an operation mixes samples in a small model whose consumer doesn't
        read terms.
    """
    pair = as_batch(samples, output).rows(slice(0, 2))
    given = model, parameters, output, pair
    hidden, difference, is_right, method = None, None, True, gradients_in_turn
    is_small = n_params(parameters) < _LEAST_PARAMETERS and not reads_terms
    try:
        hidden = _mixing_operations(*given) if len(pair) > 1 else None
        if len(pair) > 1 and hidden is None:
            method = gradients_at_once
        elif hidden is not None and is_small:
            method = gradients_one_by_one
        if method is not gradients_one_by_one:
            is_right, difference = _compare(given, method)
    except InputError:
        raise
    except UnreadableGraphError as error:
        is_right, difference = False, str(error)
    except Exception as error:
        if is_out_of_memory(error):
            return gradients_at_once, (
                "memory ran out while one backward pass for all samples was compared with "
                "autograd. The pass is used without this comparison."
            )
        is_right, difference = False, f"fails: {_in_short(error)}"
    if is_right and hidden is None:
        return method, difference and f"one backward pass for all samples {difference}."
    return method if is_right else gradients_one_by_one, (
        "one backward pass for all samples cannot be used for this model. Reason: it "
        f"{'; it '.join(filter(None, (hidden, difference)))}. Gradients are computed one sample at "
        "a time, which gives the same numbers but is slower."
    )


def _compare(given: _Given, method: GradientMethod) -> tuple[bool, str | None]:
    """Return whether a method agrees with autograd up to rounding, and describe the difference.

    In float32, rounding may change the sign of a ReLU's input, so that gradients differ much
    although both methods are correct. A large difference is therefore computed again in float64. If
    rounding is the cause, the difference shrinks by the ratio of the two machine epsilons. If a
    formula is wrong, or loses digits by cancellation, it shrinks less. The description is None if
    there is no large difference.
    """
    model, *_, pair = given
    plain, allowed = _digest(given, gradients_one_by_one), least_rounding(model)
    for n in range(len(pair), 0, -1):
        first = *given[:3], pair.rows(slice(0, n))
        apart, name = _digest(first, method).difference(plain.of(slice(0, n)))
        if apart > allowed:
            with torch.no_grad(), in_evaluation_mode(model):
                _, allowed = call_with_rounding(model, pair)
        if not apart > allowed:
            continue  # also if both methods give NaN, for which a later check raises an error
        if apart == math.inf:
            return False, f"gives NaN or infinity where autograd doesn't, for parameter {name}"
        said = f"differs from autograd by {apart:.1g} of the largest entry, in {name}"
        try:
            exact, exact_name = _difference_in_float64(first, method)
        except Exception as error:
            return False, f"{said}; the comparison in float64 failed ({_in_short(error)})"
        said = f"{said}, and in float64 by {exact:.1g}"
        eps = torch.finfo(torch.float64).eps
        if exact <= min(eps * apart / least_rounding(model) ** 2 / _FAR, math.sqrt(eps)):
            return True, f"{said}, so that rounding is the cause"
        return False, f"{said}, in {exact_name}"
    return True, None


def _difference_in_float64(given: _Given, method: GradientMethod) -> tuple[float, str]:
    """Return the largest difference from autograd in float64, and the name of its parameter."""
    model, parameters, output, pair = given
    copies: dict[int, nn.Parameter] = {}
    double = copy.deepcopy(model, copies).double()
    chosen = {name: copies[id(parameter)] for name, parameter in parameters.items()}
    pair = pair.mapped(lambda x: x.double() if x.is_floating_point() else x)
    exact = double, chosen, output, pair
    return _digest(exact, method).difference(_digest(exact, gradients_one_by_one))


def _digest(given: _Given, method: GradientMethod) -> Digest:
    _, parameters, _, pair = given
    digest = Digest.zeros(parameters, len(pair))
    strict = {} if method is gradients_one_by_one else {"must": True}
    method(*given, digest, **strict)
    return digest


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _mixing_operations(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, pair: Batch
) -> str | None:
    """Return a phrase that names the operations that mix samples, or None if there are none.

    Per-sample gradients are formed for tensors that depend on parameters alone, and for inputs of
    operations that mix samples. A batch of three samples differs from a batch of two only in the
    number or shapes of the latter, so the comparison of two such batches reveals these operations.
    """
    arrivals: list[Counter[tuple[str, tuple[int, ...]]]] = []
    for n in (2, 3):
        batch = pair.rows(torch.arange(n) % 2)
        with differentiating(model, parameters.values()):
            outputs = output.read(batch.given_to(model))
            values = over_samples(output.value, outputs, batch.labels)
        check_graph(values)
        plan = plan_of(values, list(parameters.values()), 0)
        arrivals.append(Counter(plan.arrivals()))
        del outputs, values, plan  # free the graph
    two, three = arrivals
    names = dict.fromkeys(name for name, _ in [*(two - three), *(three - two)])
    return f"cannot tell samples apart in these operations: {', '.join(names)}" if names else None

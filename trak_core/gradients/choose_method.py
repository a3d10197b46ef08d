"""Choose how to compute a model's per-sample gradients, and compare them with autograd's."""

import copy
import math
from collections import Counter

import torch
from torch import nn

from trak_core.errors import InputError, first_line, is_out_of_memory
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

# For models with fewer parameters than this, autograd (``gradients_one_by_one``) is rarely slower
# than ``gradients_in_turn``, because the gradients fit into the CPU's caches. The measurements are
# in RESULTS.md, "Methods to compute gradients".
_LEAST_PARAMETERS = 8_000_000
# If two methods differ because of rounding, the difference in float64 is smaller than in float32 by
# about the ratio of the machine epsilons. The ratio of differences may be smaller by this factor.
_SLACK = 10

_Arguments = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]


def gradient_method(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    *,
    reads_terms: bool = False,
) -> GradientMethod:
    """Return the method that ``choose_method`` chooses, and print the notice for the user."""
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

    The gradient of a text is a sum of terms, one for each token. ``reads_terms`` says whether the
    consumer of the gradients reads these terms, which ``gradients_one_by_one`` doesn't compute.

    Returns:
        The method, and a notice for the user that explains the choice. The notice is None if there
        is nothing to explain. Usually, the method is ``gradients_at_once``. It is
        ``gradients_in_turn`` if there is only one sample, or if an operation mixes samples. It is
        ``gradients_one_by_one``, which calls autograd for each sample, in three cases: the graph
        can't be read, the gradients of the other method differ by more than rounding errors, or an
        operation mixes samples in a small model and ``reads_terms`` is False.
    """
    pair = as_batch(samples, output).rows(slice(0, 2))
    arguments = model, parameters, output, pair
    hidden, difference, is_right, method = None, None, True, gradients_in_turn
    is_small = n_params(parameters) < _LEAST_PARAMETERS and not reads_terms
    try:
        hidden = _mixing_operations(*arguments) if len(pair) > 1 else None
        if len(pair) > 1 and hidden is None:
            method = gradients_at_once
        elif hidden is not None and is_small:
            method = gradients_one_by_one
        if method is not gradients_one_by_one:
            is_right, difference = _compare(arguments, method)
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


def _compare(arguments: _Arguments, method: GradientMethod) -> tuple[bool, str | None]:
    """Return whether a method's gradients equal autograd's, and a description of the difference.

    The description is None unless the difference is larger than usual rounding errors. In float32,
    rounding can change the sign of a ReLU's input, so that gradients differ much although both
    methods are correct. Therefore, a large difference is computed again in float64. If rounding is
    the cause, the difference in float64 is smaller by the ratio of the two machine epsilons. If a
    formula is wrong or loses digits by cancellation, the difference decreases less, and the
    gradients count as unequal.
    """
    model, *_, pair = arguments
    plain, allowed = _digest(arguments, gradients_one_by_one), least_rounding(model)
    for n in range(len(pair), 0, -1):
        first = *arguments[:3], pair.rows(slice(0, n))
        apart, name = _digest(first, method).difference(plain.for_samples(slice(0, n)))
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
        if exact <= min(eps * apart / least_rounding(model) ** 2 / _SLACK, math.sqrt(eps)):
            return True, f"{said}, so that rounding is the cause"
        return False, f"{said}, in {exact_name}"
    return True, None


def _difference_in_float64(arguments: _Arguments, method: GradientMethod) -> tuple[float, str]:
    """Return the largest difference from autograd in float64, and the name of the parameter."""
    model, parameters, output, pair = arguments
    copies: dict[int, nn.Parameter] = {}
    double = copy.deepcopy(model, copies).double()
    chosen = {name: copies[id(parameter)] for name, parameter in parameters.items()}
    pair = pair.mapped(lambda x: x.double() if x.is_floating_point() else x)
    exact = double, chosen, output, pair
    return _digest(exact, method).difference(_digest(exact, gradients_one_by_one))


def _digest(arguments: _Arguments, method: GradientMethod) -> Digest:
    _, parameters, _, pair = arguments
    digest = Digest.zeros(parameters, len(pair))
    strict = {} if method is gradients_one_by_one else {"must": True}
    method(*arguments, digest, **strict)
    return digest


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:200]}"


def _mixing_operations(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, pair: Batch
) -> str | None:
    """Return a phrase that names the operations that mix samples, or None if no operation does.

    Per-sample gradients are stored for inputs of operations that mix samples, and also for tensors
    that depend on parameters alone. To tell them apart, the function plans the backward pass for
    two and for three samples. Only for operations that mix samples do the stored gradients differ
    in number or shape.
    """
    formed: list[Counter[tuple[str, tuple[int, ...]]]] = []
    for n in (2, 3):
        batch = pair.rows(torch.arange(n) % 2)
        with differentiating(model, parameters.values()):
            outputs = output.read(batch.given_to(model))
            values = over_samples(output.value, outputs, batch.labels)
        check_graph(values)
        plan = plan_of(values, list(parameters.values()), 0)
        formed.append(Counter(plan.formed_inputs()))
        del outputs, values, plan  # free the graph
    two, three = formed
    names = dict.fromkeys(name for name, _ in [*(two - three), *(three - two)])
    return f"cannot tell samples apart in these operations: {', '.join(names)}" if names else None

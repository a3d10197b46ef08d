"""Choose the way to a model's per-sample gradients, by what several ways give for two samples."""

import math
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto

import torch
from torch import nn

from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients.differentiable_model import (
    check_graph,
    differentiating,
    in_evaluation_mode,
    n_params,
)
from trak_core.gradients.gradient_consumers import Digest, Twin
from trak_core.gradients.gradient_methods import (
    GradientMethod,
    SamplesSharedError,
    gradients_at_once,
    gradients_at_once_or_with_copies,
    gradients_in_turn,
    gradients_one_by_one,
    gradients_with_copies,
)
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, least_rounding, rounding
from trak_core.gradients.one_pass import plan_of
from trak_core.gradients.sample_owner_rules import MixedSamplesError
from trak_core.model_outputs.model_output import ModelOutput, over_samples


def gradient_method(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    *,
    reads_terms: bool = False,
) -> GradientMethod:
    """Return the method of ``choose_method``, and print what it says."""
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
    """Compute the gradients of the first two samples in two ways, and choose the method.

    One pass for all samples is compared with plain autograd, a sample at a time. Where one pass
    cannot take the model, a sample alone is compared with a sample beside a copy of itself. If two
    ways disagree, finite differences in float64 say which is right. If they agree in float64, both
    are: float32 rounded a number to the other side of a ReLU's 0, say. One pass is not taken where
    it loses digits that autograd keeps: float64 too shows some of this.

    Args:
        model: It may be in any mode.
        parameters: Those to differentiate.
        output: The model output f.
        samples: Two, or one.
        reads_terms: Whether gradients are wanted as factors, however few entries they have.

    Returns:
        ``gradients_at_once``; ``gradients_in_turn`` where it cannot tell samples apart, or there is
        one sample; ``gradients_one_by_one`` where neither can read the model's graph, or gives
        other numbers that are not shown to be right, and in place of ``gradients_in_turn`` where
        samples can't be told apart, the model is small and nothing ``reads_terms``. Where autograd
        is wrong for a sample alone, a method that gives it a copy. And a notice why, or None.
    """
    batch = as_batch(samples, output)
    given = model, parameters, output, batch.rows(slice(0, 2))
    if len(batch) < 2:
        return _in_turn_or_plain(given), None
    try:
        reason = _hiding_operations(*given)
        if reason is None:
            return _at_once_or_alone(given)
    except InputError:
        raise
    except UnreadableGraphError as error:
        reason = str(error)
    except Exception as error:
        if is_out_of_memory(error):
            return gradients_at_once, _NOT_COMPARED
        reason = f"fails: {_in_short(error)}"
    return _alone_or_beside_copies(given, reason, reads_terms)


# Below so many, passes by factors, a sample each, are rarely faster than plain autograd, whose
# gradients stay in a core's caches (RESULTS.md, "Ways to gradients"). Recurrent layers, which give
# no factors, don't count.
_LEAST_PARAMETERS = 8_000_000


_Given = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]


_NOT_COMPARED = (
    "memory ran out where one backward pass for all samples was compared with autograd. The pass "
    "is taken without that"
)


_CANNOT_TAKE = "one backward pass for all samples cannot take this model; it"


_ALONE_IS_WRONG = (
    "autograd gives wrong gradients of this model where a sample is alone in its batch; they are "
    "off by {} of the largest entry, and finite differences in float64 agree with a batch of "
    "several. A sample that is alone is differentiated beside a copy of itself"
)


def _at_once_or_alone(given: _Given) -> tuple[GradientMethod, str | None]:
    plain = _digest(given, gradients_one_by_one)
    difference = _difference(given, gradients_at_once, plain)
    if difference is None:
        given = *given[:3], given[3].rows(slice(0, 1))
        difference = _difference(given, gradients_at_once, plain.of(slice(0, 1)))
    if difference is None:
        return gradients_at_once, None
    slower = "with the same numbers but slower"
    if difference == math.inf:
        reason = "gives NaN or infinity where autograd doesn't"
    else:
        right, why = _which_is_right(given, gradients_at_once, difference)
        if right is _Right.METHOD:
            own = _digest(given, gradients_at_once)
            if _difference(given, gradients_with_copies, own) is None:
                notice = f"{_ALONE_IS_WRONG.format(f'{difference:.1g}')}."
                return gradients_at_once_or_with_copies, notice
            why = "a hook or a function of the model changes gradients"
        reason = f"differs from autograd by {difference:.1g} of the largest entry; {why}"
        if right is _Right.BOTH:
            return gradients_at_once, f"one backward pass for all samples {reason}."
        slower = slower if right is _Right.AUTOGRAD else "which is slower"
    notice = f"{_CANNOT_TAKE} {reason}. Gradients are computed one sample at a time, {slower}."
    return gradients_one_by_one, notice


def _alone_or_beside_copies(
    given: _Given, reason: str, reads_terms: bool
) -> tuple[GradientMethod, str]:
    """Choose for a model that one pass cannot take, for a reason in words."""
    notice = f"{_CANNOT_TAKE} {reason}. Gradients are computed one sample at a time,"
    plain = difference = None
    with suppress(Exception):  # a model that takes no batch is compared with nothing
        plain = _digest(given, gradients_one_by_one)
        difference = _difference(given, gradients_with_copies, plain)
    if difference is not None and (
        _which_is_right(given, gradients_with_copies, difference)[0] is _Right.METHOD
    ):
        wrong = _ALONE_IS_WRONG.format(f"{difference:.1g}")
        return gradients_with_copies, f"{notice} which is slower. And {wrong}."
    notice = f"{notice} with the same numbers but slower."
    model, parameters, *_ = given
    layers = (layer for layer in model.modules() if isinstance(layer, nn.RNNBase))
    recurrent = {id(p) for layer in layers for p in layer.parameters()}
    others = {name: p for name, p in parameters.items() if id(p) not in recurrent}
    if n_params(others) < _LEAST_PARAMETERS and not reads_terms:
        return gradients_one_by_one, notice
    return _in_turn_or_plain(given, plain), notice


def _in_turn_or_plain(given: _Given, plain: Digest | None = None) -> GradientMethod:
    """Choose between two ways that differentiate one sample at a time, by what they give."""
    try:
        differs = _difference(given, gradients_in_turn, plain) is not None
    except InputError:
        raise
    except Exception:
        # What a graph has saved may be out of reach: one that was compiled, say.
        differs = True
    return gradients_one_by_one if differs else gradients_in_turn


def _difference(given: _Given, method: GradientMethod, plain: Digest | None = None) -> float | None:
    """Return how far a method is from plain autograd; None if rounding explains it.

    ``plain`` is what autograd gave, if it is known.
    """
    model, _, _, pair = given
    plain = _digest(given, gradients_one_by_one) if plain is None else plain
    difference = _digest(given, method).difference(plain)
    if difference <= least_rounding(model):
        return None
    with in_evaluation_mode(model):
        allowed = rounding(model, pair)
    # The check of features explains NaN in both, with sample and parameter.
    return difference if difference > allowed else None


def _digest(given: _Given, method: GradientMethod) -> Digest:
    _, parameters, _, pair = given
    digest = Digest.zeros(parameters, len(pair))
    method(*given, digest)
    return digest


# So much larger is another kind of difference.
_FAR = 10


class _Right(Enum):
    """Which of two ways that disagree is right: autograd for a sample alone, or another method."""

    AUTOGRAD = auto()
    METHOD = auto()
    BOTH = auto()  # up to rounding
    UNKNOWN = auto()


def _which_is_right(given: _Given, method: GradientMethod, apart: float) -> tuple[_Right, str]:
    """Return which is right, autograd for a sample alone or a method, and why, in words.

    ``apart`` is how far they are from each other.
    """
    try:
        twin = Twin.of(*given)
        in_float64 = twin.model, twin.parameters, twin.output, twin.pair
        digests = [_digest(in_float64, way) for way in (method, gradients_one_by_one)]
        difference = digests[0].difference(digests[1])
        if not difference > twin.allowed():
            why = f"in float64 by {difference:.1g}"
            if math.isnan(difference):
                return _Right.UNKNOWN, why
            if _loses_digits(given, method, apart, digests):
                return _Right.AUTOGRAD, f"{why}, so that one pass loses digits"
            return _Right.BOTH, f"{why}, so that it is a matter of rounding"
        number = twin.which_is_right(*digests)
    except Exception as error:
        why = f"finite differences could not say which is right ({_in_short(error)})"
        return _Right.UNKNOWN, why
    if number is None:
        return _Right.UNKNOWN, "finite differences in float64 agree with neither"
    right = _Right.AUTOGRAD if number == 1 else _Right.METHOD
    return right, "finite differences in float64 agree with autograd"


def _loses_digits(
    given: _Given, method: GradientMethod, apart: float, digests: Sequence[Digest]
) -> bool:
    """Return whether a method's own formulas explain how far it is from autograd, ``apart``.

    They would lose as many digits in float64, by which ``digests`` are. What float32 rounds to the
    other side of a kink is much nearer there, in units of the last place. Nor do they explain it
    where autograd is about as far from float64 as the method is.
    """
    units = apart / least_rounding(given[0]) ** 2
    if digests[0].difference(digests[1]) / torch.finfo(torch.float64).eps <= units / _FAR:
        return False
    own, plain = (
        _digest(given, way).difference(digests[1]) for way in (method, gradients_one_by_one)
    )
    return own > _FAR * plain


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


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
            outputs = output.read(batch.given_to(model))
            values = over_samples(output.value, outputs, batch.labels)
        del outputs
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

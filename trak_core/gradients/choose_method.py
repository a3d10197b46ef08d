"""Choose and run a way to per-sample gradients: one backward pass for all samples, or one each."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from enum import Enum, auto

import torch
from torch import Tensor, nn

from trak_core.autograd.gradient_terms import Dense
from trak_core.autograd.layout_rules import MixedSamplesError
from trak_core.autograd.one_pass import GraphNeededError, by_samples, plan_of
from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients.collect_gradients import Digest, Formed, SampleConsumer, Twin
from trak_core.gradients.model_inputs import (
    Batch,
    Samples,
    as_batch,
    joined,
    least_rounding,
    rounding,
)
from trak_core.gradients.per_sample import (
    PerSample,
    beside_gradient,
    beside_gradients,
    check_graph,
    differentiating,
    in_evaluation_mode,
    memory_formats_kept_apart,
    n_params,
    per_sample,
)
from trak_core.model_outputs.model_output import ModelOutput, of_sample, over_samples
from trak_core.system.job import return_freed

GradientMethod = Callable[
    [nn.Module, dict[str, nn.Parameter], ModelOutput, Samples, SampleConsumer], list[Tensor]
]


class SamplesSharedError(Exception):
    """The graph doesn't say which gradient belongs to which sample."""


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
    except Exception as error:
        if is_out_of_memory(error):
            return gradients_at_once, None
        reason = f"fails: {_in_short(error)}{_remedy(model)}"
    return _alone_or_beside_copies(given, reason, reads_terms)


# Below so many, passes by factors, a sample each, are rarely faster than plain autograd, whose
# gradients stay in a core's caches (RESULTS.md, "Ways to gradients"). Recurrent layers, which give
# no factors, don't count.
_LEAST_PARAMETERS = 8_000_000
_Given = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]
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
            notice = f"{_ALONE_IS_WRONG.format(f'{difference:.1g}')}."
            return gradients_at_once_or_with_copies, notice
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
        digests = [_digest(in_float64, one) for one in (method, gradients_one_by_one)]
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
        _digest(given, one).difference(digests[1]) for one in (method, gradients_one_by_one)
    )
    return own > _FAR * plain


def _remedy(model: nn.Module) -> str:
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        return ". Let make_model() return it without torch.compile"
    return ""


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
    return _in_turn(model, parameters, output, samples, consumer, n_copies=1)


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


def gradients_with_copies(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Return what ``gradients_one_by_one`` does; the model is called with each sample and a copy.

    f of the sample alone is differentiated, so that the copy adds nothing. It costs twice the time.
    """
    return _in_turn(model, parameters, output, samples, consumer, n_copies=2)


def gradients_at_once_or_with_copies(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
) -> list[Tensor]:
    """Return what ``gradients_at_once`` does; the model never sees a sample without another."""
    batch = as_batch(samples, output)
    method = gradients_with_copies if len(batch) == 1 else gradients_at_once
    return method(model, parameters, output, batch, consumer)


# Gradients of so many bytes, and the heap is given back: activations have gone, whose room a large
# matrix' gradient doesn't take.
_RETURNED_BYTES = 2**27


def _in_turn(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    consumer: SampleConsumer,
    n_copies: int,
) -> list[Tensor]:
    batch = as_batch(samples, output)
    rows: list[tuple[Tensor, ...]] = []

    # Autograd keeps what a hook returns until the pass is over. What came to be between two
    # gradients would lie where the first was, so that the next one finds no room there.
    nothing = [p.new_zeros(()).expand(p.shape) for p in parameters.values()]
    n_bytes = 0

    def watch(
        parameter: Tensor, no_gradient: Tensor, taker: SampleConsumer
    ) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            nonlocal n_bytes
            taker.take(parameter, [Dense(gradient.detach()[None, None])])
            n_bytes += gradient.nbytes
            if n_bytes > _RETURNED_BYTES and gradient.device.type == "cpu":
                return_freed()
                n_bytes = 0
            return no_gradient

        return hook

    for i in range(len(batch)):
        sample = batch.rows(slice(i, i + 1))
        given = joined([sample] * n_copies)
        with ExitStack() as stack, differentiating(model, parameters.values()):
            outputs = output.read(given.given_to(model))
            outputs = of_sample(outputs, 0, n_copies)
            f = output.value(outputs, sample.labels[0])
            taker = consumer.of(slice(i, i + 1))
            for parameter, no_gradient in zip(parameters.values(), nothing, strict=True):
                hook = watch(parameter, no_gradient, taker)
                stack.callback(parameter.register_hook(hook).remove)
            check_graph(f)
            stack.enter_context(memory_formats_kept_apart(f))
            torch.autograd.grad(f, list(parameters.values()), allow_unused=True)
            taker.finish()
        rows.append((f.detach(), *beside_gradient(output, outputs, sample.labels[0], f)))
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

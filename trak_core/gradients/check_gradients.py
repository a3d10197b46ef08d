"""Raise an error for samples, labels and gradients that would give meaningless scores.

The functions detect samples that affect each other, labels that the model cannot have learned, and
gradients that are NaN, infinite, zero for all samples or equal for all samples.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from trak_core.errors import InputError, first_line, listed
from trak_core.gradients.differentiable_model import in_evaluation_mode
from trak_core.gradients.gradient_consumers import Digest
from trak_core.gradients.gradient_methods import gradients_one_by_one
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, call, call_with_rounding
from trak_core.model_outputs.model_output import (
    IGNORED,
    ModelOutput,
    of_sample,
    over_samples,
    random_output,
    rows_in,
)
from trak_core.runtime.progress import notice, print_line

# Number of samples that ``check_samples_apart`` compares.
_SAMPLES = 8
_LABEL_SHAPES = (
    "one number for each sample, shape (samples,)",
    "one token for each position",
    "one class for each pixel",
)
# A step of a forward pass: the name of a module, and the module's input or output tensors.
_Step = tuple[str, list[Tensor]]
# If the user's model raises one of these errors for a single sample, the error is quoted in the
# message of an ``InputError``.
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
# Upper bound for the rounding error of a sample's features, relative to their largest entry.
_ROUNDING = 1e-5


def check_samples_apart(model: nn.Module, output: ModelOutput, samples: Samples) -> None:
    """Raise an error if a sample's output depends on other samples, random numbers or padding.

    In evaluation mode, the model outputs of the first eight samples are computed in one batch, and
    then in eight batches of one sample. If the two results differ, the function looks for the
    cause. If the cause is in the model, the error names the first layer whose output differs.
    """
    batch = as_batch(samples, output).rows(slice(0, _SAMPLES))
    if len(batch) < 2:
        return
    with torch.no_grad(), in_evaluation_mode(model):
        returned, allowed = call_with_rounding(model, batch)
        together, sizes = _read(output, returned, batch)
        with suppress(Exception):  # The function may not support labels of other samples.
            _notice_ignored_label(output, returned, batch.labels)
        tolerance = allowed * (1 + together.abs() + sizes)
        # ``rows`` removes the padding of each text. If the model outputs then differ, the code
        # below determines whether padding is the reason.
        alone = _one_by_one(model, output, [batch.rows(slice(i, i + 1)) for i in range(len(batch))])
        if _close(together, alone, tolerance):
            return
        returned = batch.given_to(model)
        first, second = (_read(output, returned, batch)[0] for _ in range(2))
        if not _close(first, second, tolerance):  # the function f itself draws random numbers
            values = f"{float(first[0]):.6g}, then {float(second[0]):.6g}"
            raise random_output(f"{values} for one sample")
        if not _close(together, first, tolerance):
            steps, others = (_steps(model, batch)[0] for _ in range(2))
            layer = _first_difference(steps, others, allowed)
            raise InputError(
                "In evaluation mode, the model must return the same numbers for the same batch "
                f"every time. Found different numbers in two calls. They first differ in {layer}. "
                "Switch off the randomness of this layer if `module.training` is False.",
                code="gradients.random_model",
            )
        if batch.lengths is not None:
            padded = _one_by_one(model, output, [_alone(batch, i) for i in range(len(batch))])
            if _close(together, padded, tolerance):
                if isinstance(alone, Exception):
                    raise alone
                raise InputError(
                    "The model output of a text must not depend on padding, which is added on the "
                    "right of shorter texts. Padding changes the model output by up to "
                    f"{_largest_difference(together, alone):.2g}. If tokens attend to later "
                    "tokens, let the model use an input `attention_mask`, or make all texts "
                    "equally long.",
                    code="gradients.padding",
                )
            alone = padded
        if isinstance(alone, Exception):
            reason = f"the model fails: {first_line(alone)}"
        else:
            reason = f"its output differs by up to {_largest_difference(alone, together):.2g}"
        raise InputError(
            "The model output of a sample must not depend on other samples of its batch. When the "
            f"model gets one sample at a time, {reason}. The first layer that mixes samples is "
            f"{_likely_layer(model, batch, allowed)}. BatchNorm needs `track_running_stats=True`. "
            "A loss or normalization across the batch has no per-sample gradient.",
            code="gradients.mixed_samples",
        )


def _one_by_one(
    model: nn.Module, output: ModelOutput, parts: Sequence[Batch]
) -> Tensor | Exception:
    """Return the model outputs of batches of one sample, or the error that the model raised."""
    try:
        return torch.cat([_read(output, part.given_to(model), part)[0] for part in parts])
    except _FAILURES as error:
        return error


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().nan_to_num(torch.inf).max())


def _read(output: ModelOutput, returned: object, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each sample's model output f, and the largest absolute value in the model's result."""
    outputs = output.read(returned)
    n, labels = len(batch), batch.labels
    rows = rows_in(outputs, n)
    values = torch.stack([output.value(of_sample(outputs, i, n), labels[i]) for i in range(n)])
    sizes = torch.zeros_like(values)
    for x in rows:
        if x.is_floating_point() and x.numel():
            sizes = sizes.maximum(x.abs().reshape(len(x), -1).max(dim=1).values)
    return values, sizes


def _close(a: Tensor, b: Tensor | Exception, tolerance: Tensor) -> bool:
    if isinstance(b, Exception):
        return False
    both_bad = ~a.isfinite() & ~b.isfinite()
    return bool((both_bad | ((a - b).abs() <= tolerance)).all())


def _alone(batch: Batch, i: int) -> Batch:
    """Return sample ``i`` as a batch of one sample that keeps the padding of ``batch``."""
    return batch.mapped(lambda tensor: tensor[i : i + 1])


def _likely_layer(model: nn.Module, batch: Batch, allowed: float) -> str:
    """Return the name of the first layer whose result for sample 0 depends on other samples."""
    alone, failed = _steps(model, _alone(batch, 0))
    if failed is not None:
        return failed
    together, _ = _steps(model, batch)
    first_rows = ((name, [tensor[:1] for tensor in tensors]) for name, tensors in together)
    return _first_difference(first_rows, alone, allowed)


def _first_difference(steps: Iterable[_Step], others: Iterable[_Step], allowed: float) -> str:
    for (name, tensors), (_, other_tensors) in zip(steps, others, strict=False):
        for a, b in zip(tensors, other_tensors, strict=False):
            is_float = b.is_floating_point() and b.numel()
            size = float(b.abs().nan_to_num().max()) if is_float else 0.0
            if a.shape != b.shape or not torch.allclose(a, b, 0, allowed * size, equal_nan=True):
                return name
    return "the code of the model itself"


def _steps(model: nn.Module, batch: Batch) -> tuple[list[_Step], str | None]:
    """Return the inputs and results of the model's modules, in the order of the calls.

    If the model raises an error, also return the name of the module that failed.
    """
    steps: list[_Step] = []
    inside: list[str] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            label = f"{name or 'the model itself'} ({type(module).__name__})"

            def enter(_: Any, args: Any, kwargs: Any, label: str = label) -> None:
                inside.append(label)
                steps.append((f"the code that calls {label}", _tensors((args, kwargs), len(batch))))

            def leave(_: Any, args: Any, result: Any) -> None:
                steps.append((inside.pop(), _tensors(result, len(batch))))

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        try:
            batch.given_to(model)
        except _FAILURES:
            return steps, inside[-1]
    return steps, None


def _tensors(tree: Any, n_rows: int) -> list[Tensor]:
    """Return copies of all tensors with ``n_rows`` rows in ``tree``, a nested container."""
    leaves = pytree.tree_leaves(tree)
    rows = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    return [leaf.detach().clone() for leaf in rows if len(leaf) == n_rows]


def count_classes(
    model: nn.Module, output: ModelOutput, samples: Samples, device: torch.device
) -> int | None:
    """Return the number of classes that the model predicts, by calling it with the first sample.

    The result is at least 2, or None if labels are not classes. The model must be on ``device``,
    but the samples may be on another device. An ``InputError`` is raised if the model output of
    the sample can't be computed.
    """
    sample = as_batch(samples, output).rows(slice(0, 1)).mapped(lambda tensor: tensor.to(device))
    with torch.no_grad(), in_evaluation_mode(model):
        returned = output.read(call(model, sample))
        outputs = of_sample(returned, 0, 1)
        n_classes = output.n_classes(outputs)
    if n_classes is not None and n_classes < 2:
        raise InputError(
            "To compute the log-odds of a label, the model must return one logit for each of at "
            f"least 2 classes. It returns {n_classes}. Instead of a single logit x, let the model "
            "return (0, x).",
            code="gradients.too_few_classes",
        )
    _notice_unlikely(output, outputs, sample)
    if output.label_ndim is None:
        # This call raises an error with an explanation if the model output can't be computed.
        over_samples(output.value, returned, sample.labels)
    elif sample.labels.ndim == 1 + output.label_ndim:
        label = torch.zeros_like(sample.labels[0])
        try:
            shape = tuple(output.value(outputs, label).shape)
        except (RuntimeError, IndexError) as error:
            shape = f"{type(error).__name__}: {first_line(error)}"
        if shape:
            raise InputError(
                f"The model output must be one number for each sample. Found {shape}. For this "
                f"sample, the model returned a tensor of shape {tuple(outputs.shape)}, and the "
                f"label has shape {tuple(label.shape)}.",
                code="gradients.output_shape",
            )
    return n_classes


def _notice_unlikely(output: ModelOutput, outputs: Any, sample: Batch) -> None:
    """Print a notice if the model seems to return probabilities, or if labels seem shifted."""
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(outputs)):
        return  # fake tensors have shapes but no values
    # The first dimension is the classes, for a sample or for each of its pixels.
    has_classes = output.label_ndim in {0, 2} and isinstance(outputs, Tensor)
    sums = outputs.sum(0) if has_classes and outputs.numel() > 1 else torch.zeros(1)
    if (abs(sums - 1) < 1e-4).all() and (outputs >= 0).all():
        notice(
            "the model returns numbers from 0 to 1 that add up to 1, such as the probabilities of "
            "a softmax. These numbers are used as logits. Let the model return logits, unless "
            "training also used these numbers as logits."
        )
    tokens = sample.kwargs.get("input_ids", next(iter(sample.args), None))
    if output.predicts_next and tokens is not None and tokens.shape == sample.labels.shape:
        counts, ahead = sample.labels != IGNORED, tokens.roll(-1, dims=1)
        counts[:, -1] = False
        same, shifted = ((t == sample.labels)[counts] for t in (tokens, ahead))
        if len(same) > 2 and shifted.all() and not same.all():
            notice(
                "each label is the next token of the text, so the labels seem to be shifted. The "
                "model output shifts the labels itself. Therefore, don't shift them: the label at "
                "a position must be the token at the same position."
            )


def _notice_ignored_label(output: ModelOutput, returned: Any, labels: Tensor) -> None:
    """Print a notice if a user's model output ignores the label, but has loss weights of 1."""
    others = labels.flip(0)
    reads_labels = output.label_ndim is None and output.has_labels and not output.takes_labels
    if not reads_labels or torch.equal(labels, others):
        return
    read = output.read(returned)
    values, swapped = (over_samples(output.value, read, y) for y in (labels, others))
    if torch.equal(values, swapped) and (over_samples(output.loss_weight, read, labels) == 1).all():
        notice(
            "the model outputs of the first samples would be the same with other labels. All loss "
            "weights are 1, which is correct only if the model output is minus the training loss. "
            "Otherwise, use a ModelOutput with a `loss_weight`."
        )


def check_labels(
    labels: Tensor, output: ModelOutput, n_classes: int | None, sample_ids: Sequence[object]
) -> None:
    """Raise an error for labels, shape (batch, ...), that the model cannot have been trained with.

    A label must have the shape and dtype that the model output expects. If labels are classes, they
    must be integers from 0 to n_classes - 1, where ``n_classes`` is the result of
    ``count_classes``. All other labels must be finite numbers. If a label has several entries, at
    least one entry must differ from ``IGNORED``.
    """
    if output.label_ndim is None and (n_classes is None or not output.has_labels):
        return
    has_parts = output.label_ndim != 0
    if output.label_ndim is not None and labels.ndim != 1 + output.label_ndim:
        raise InputError(
            f"A label must be {_LABEL_SHAPES[output.label_ndim]}. Found labels of shape "
            f"{tuple(labels.shape)}. Reshape the labels, such as by `squeeze()`, or write your own "
            "model output.",
            code="gradients.label_shape",
        )
    if n_classes is None:
        good = torch.isfinite(labels)
        expected = "finite numbers"
    else:
        is_whole = not (labels.is_floating_point() or labels.is_complex())
        if output.label_ndim is not None and not (is_whole and labels.dtype is not torch.bool):
            raise InputError(
                f"Labels must be integers from 0 to {n_classes - 1}. Found {labels.dtype}.",
                code="gradients.label_dtype",
            )
        good = (labels >= 0) & (labels < n_classes) & (labels == labels.long())
        expected = f"integers from 0 to {n_classes - 1}, the classes of the study's model"
        if has_parts:
            good |= labels == IGNORED
            expected += f", or {IGNORED} to ignore an entry"
    if not good.all():
        i = int((~good).nonzero()[0, 0])
        bad = labels[i][~good[i]] if has_parts else labels[i]
        raise InputError(
            f"Labels must be {expected}. Found {bad.flatten()[0].item()} in sample "
            f"{sample_ids[i]}.",
            code="gradients.label_value",
        )
    if has_parts:
        # ``label_number`` returns a number of entries only if ``label_ndim`` is known. Otherwise,
        # it may return the class itself, and class 0 would be mistaken for an empty label.
        if output.label_ndim is None:
            is_empty = (labels.reshape(len(labels), -1) == IGNORED).all(1)
        else:
            is_empty = vmap(output.label_number)(labels) == 0
        empty = is_empty.nonzero().flatten().tolist()
        if empty:
            where = ", after its first token" if output.predicts_next else ""
            raise InputError(
                f"A label must have an entry other than {IGNORED}{where}. The label of sample "
                f"{sample_ids[empty[0]]} has no such entry.",
                code="gradients.empty_label",
            )


def explain_not_finite(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    sample_ids: Sequence[object],
) -> None:
    """Raise an error that names the samples and parameters whose gradients are not finite."""
    batch = as_batch(samples, output)
    # The digest contains products of gradients with a random vector. They are computed in float64,
    # in which sums of float32 numbers don't overflow, so a product is finite if and only if the
    # gradient is finite.
    digest = Digest.zeros(parameters, len(batch), torch.float64)
    outputs, *_ = gradients_one_by_one(model, parameters, output, batch, digest)
    bad = ~torch.isfinite(outputs)
    names = ["the model output itself"] if bad.any() else []
    for name, products in digest.rows.items():
        rows = ~torch.isfinite(products).all(dim=1)
        if rows.any():
            names.append(name)
            bad = bad | rows
    if names:
        bad_ids = [sample_ids[i] for i in bad.nonzero().flatten().tolist()]
        overflow = ""
        if torch.float16 in {parameter.dtype for parameter in parameters.values()}:
            overflow = " float16 overflows above 65504. Use bfloat16 or float32 weights."
        raise InputError(
            "Per-sample gradients must be finite. Found NaN or infinity for the samples "
            f"{listed(bad_ids)} in {listed(names)}. Look for NaN, infinity and very large numbers "
            f"in these samples and in the checkpoint.{overflow}",
            code="gradients.not_finite",
        )


class Variety:
    """Count samples whose gradient is zero, and determine whether all gradients are equal.

    Attributes:
        n_samples: Number of samples that were added.
        n_zero: Number of these samples whose gradient is zero.
        are_alike: Whether the gradients of all samples are equal up to rounding.
    """

    def __init__(self) -> None:
        self.n_samples = self.n_zero = 0
        self.are_alike = True
        self._first: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """Add n samples, whose gradients are represented by ``rows``, shape (n, k).

        A row contains the features of a sample, or the inner products of the sample's gradient
        with the gradients of all samples.
        """
        first = rows[0].astype(np.float64) if self._first is None else self._first
        self._first = first
        self.n_samples += len(rows)
        self.n_zero += int((~rows.any(axis=1)).sum())
        if self.are_alike:
            allowed = max(_ROUNDING, 4 * float(np.finfo(rows.dtype).eps))
            largest = float(np.abs(first).max())
            self.are_alike = bool(np.abs(rows - first).max() <= allowed * largest)

    def check(self, samples: str, *, must_differ: bool) -> None:
        """Raise an error if the gradients of several samples are all zero. Warn if most are zero.

        With ``must_differ``, also raise an error if the gradients of several samples are all equal.
        Targets need not differ, because a user may choose the same sample several times.
        ``samples`` is the name of the samples in messages, such as "training samples".
        """
        n = self.n_samples
        if n > 1 and self.n_zero == n:
            raise InputError(
                f"Gradients must not be 0 for every sample. They are 0 for all {n} {samples}, so "
                "that all scores would be 0. Look for `parameters` on which the model output "
                "doesn't depend, layers whose weights are 0 in the checkpoint, and a `detach()`.",
                code="gradients.all_zero",
            )
        if n > 1 and self.are_alike and must_differ:
            raise InputError(
                f"Gradients must differ between samples. They are equal for all {n} {samples}. "
                "Look for a data set that always returns the same sample, a model that ignores its "
                "input, and `parameters` with a constant gradient, such as a regression's bias.",
                code="gradients.all_alike",
            )
        if 2 * self.n_zero > n:
            print_line(
                f"Warning: the gradients of {self.n_zero} of {n} {samples} are 0 in every entry, "
                "so the scores of these samples are 0. Look for layers with gradient 0, such as a "
                "ReLU whose inputs are all negative."
            )

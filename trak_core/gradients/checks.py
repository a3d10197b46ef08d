"""Refuse models that mix the samples of a batch, and labels that no such model can have."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from trak_core.errors import InputError
from trak_core.gradients.batch import Batch, Samples, as_batch, call, rounding
from trak_core.gradients.per_sample import in_evaluation_mode
from trak_core.model_outputs.model_output import IGNORED, ModelOutput

_SAMPLES = 8
# A module's call: its name, what went in and what came out, both as tensors a sample.
_Call = tuple[str, list[Tensor], list[Tensor]]


def _run(model: nn.Module, output: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return f of each sample of a batch, and the largest size of what the model returned."""
    outputs = output.read(batch.given_to(model))
    if len(outputs) != len(batch):
        raise InputError(
            f"The model must return one row a sample. Found {len(outputs)} rows for a batch of "
            f"{len(batch)}.",
            code="gradients.model_rows",
        )
    pairs = zip(outputs, batch.labels, strict=True)
    sizes = outputs.abs().reshape(len(outputs), -1).max(dim=1).values
    return torch.stack([output.value(x, label) for x, label in pairs]), sizes


def _tensors(tree: Any, n_rows: int) -> list[Tensor]:
    """Return the tensors in nested containers that have one row a sample."""
    leaves = pytree.tree_leaves(tree)
    rows = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    return [leaf.detach().clone() for leaf in rows if len(leaf) == n_rows]


def _calls(model: nn.Module, batch: Batch) -> tuple[list[_Call], str | None]:
    """Run the model and record its modules.

    Returns:
        Their calls, inner before outer; and the module in which it failed, None if it did not.
    """
    calls: list[_Call] = []
    inside: list[str] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            label = f"{name or 'the model itself'} ({type(module).__name__})"

            def enter(*_: Any, label: str = label) -> None:
                inside.append(label)

            def leave(_: Any, args: Any, kwargs: Any, result: Any) -> None:
                given = _tensors((args, kwargs), len(batch))
                calls.append((inside.pop(), given, _tensors(result, len(batch))))

            handles = [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, with_kwargs=True),
            ]
            for handle in handles:
                stack.callback(handle.remove)
        try:
            batch.given_to(model)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return calls, inside[-1]
    return calls, None


def _differ(found: list[Tensor], expected: list[Tensor], allowed: float) -> bool:
    for a, b in zip(found, expected, strict=False):
        if a.shape != b.shape:
            return True
        if a.is_floating_point():
            size = float(b.abs().nan_to_num().max()) if b.numel() else 0.0
            if not torch.allclose(a, b, rtol=0, atol=allowed * size, equal_nan=True):
                return True
        elif not torch.equal(a, b):
            return True
    return False


def _first_difference(found: Iterable[_Call], expected: Iterable[_Call], allowed: float) -> str:
    """Name the first module whose result differs, or the code before it."""
    for (name, given, result), (_, given_alone, result_alone) in zip(found, expected, strict=False):
        if _differ(given, given_alone, allowed):
            return f"the code that calls {name}"
        if _differ(result, result_alone, allowed):
            return name
    return "the code of the model itself"


def _likely_layer(model: nn.Module, batch: Batch, allowed: float) -> str:
    """Return the layer in which a batch's first sample differs from itself alone."""
    alone, failed = _calls(model, _alone(batch, 0))
    if failed is not None:
        return failed
    together, _ = _calls(model, batch)

    def first_rows(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor[:1] for tensor in tensors]

    rows = ((name, first_rows(given), first_rows(result)) for name, given, result in together)
    return _first_difference(rows, alone, allowed)


def _alone(batch: Batch, i: int) -> Batch:
    """Return one sample as it is in the batch, padding and all."""
    return batch.mapped(lambda tensor: tensor[i : i + 1])


def check_samples_apart(model: nn.Module, output: ModelOutput, samples: Samples) -> None:
    """Compare f of a batch with f sample by sample, before the expensive work.

    Args:
        model: On the samples' device. Used in evaluation mode, and left as it was.
        output: The model output.
        samples: See ``as_batch``; the first eight count, and of a single one nothing is checked.

    Raises:
        InputError: If f of a sample depends on the others, or changes from call to call; it names
            the layer where that begins. If f of a text depends on its padding.
    """
    batch = as_batch(samples, output).rows(slice(0, _SAMPLES))
    if len(batch) < 2:
        return
    with torch.no_grad(), in_evaluation_mode(model):
        together, sizes = _run(model, output, batch)
        again, _ = _run(model, output, batch)
        allowed = rounding(model, batch)
        tolerance = allowed * (1 + together.abs() + sizes)
        if not _close(together, again, tolerance):
            calls, others = (_calls(model, batch)[0] for _ in range(2))
            layer = _first_difference(calls, others, allowed)
            raise InputError(
                "The model must return the same numbers every time in evaluation mode. Found "
                f"different ones for the same batch; the first layer that differs: {layer}. "
                "Switch its randomness off where `module.training` is False.",
                code="gradients.random_model",
            )
        try:
            parts = [_run(model, output, _alone(batch, i)) for i in range(len(batch))]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            alone, reason = None, f"it fails: {(str(error).splitlines() or [''])[0]}"
        else:
            alone = torch.cat([value for value, _ in parts])
            difference = float((alone - together).abs().nan_to_num(torch.inf).max())
            reason = f"f differs by up to {difference:.2g}"
        if alone is None or not _close(together, alone, tolerance):
            raise InputError(
                "The model output of a sample must not depend on the others of its batch. Found "
                f"that one by one {reason}; the first layer that mixes samples: "
                f"{_likely_layer(model, batch, allowed)}. BatchNorm needs "
                "`track_running_stats=True`; a loss or normalization across the batch has no "
                "per-sample gradient.",
                code="gradients.mixed_samples",
            )
        if batch.lengths is not None:
            _check_padding(model, output, batch, together, tolerance)


def _check_padding(
    model: nn.Module, output: ModelOutput, batch: Batch, padded: Tensor, tolerance: Tensor
) -> None:
    """Compare f of padded texts with f of the texts as they are."""
    parts = [_run(model, output, batch.rows(slice(i, i + 1))) for i in range(len(batch))]
    as_it_is = torch.cat([value for value, _ in parts])
    if not _close(padded, as_it_is, tolerance):
        difference = float((padded - as_it_is).abs().nan_to_num(torch.inf).max())
        raise InputError(
            "The model output of a text must not depend on padding: texts of different lengths are "
            f"padded on the right. Found that f differs by up to {difference:.2g} between texts "
            "padded and as they are. A model whose tokens see those that follow must take an input "
            "`attention_mask`, and leave out what it says; or give texts of one length.",
            code="gradients.padding",
        )


def _close(found: Tensor, expected: Tensor, tolerance: Tensor) -> bool:
    both_bad = ~found.isfinite() & ~expected.isfinite()
    return bool((both_bad | ((found - expected).abs() <= tolerance)).all())


_SHAPES = ("one number a sample", "one token a position", "one class a pixel")


def count_classes(
    model: nn.Module, output: ModelOutput, samples: Samples, device: torch.device
) -> int | None:
    """Run the model on a batch's first sample and return how many labels it can tell apart.

    Args:
        model: On ``device``.
        output: The model output.
        samples: See ``as_batch``.
        device: Where to run.

    Returns:
        The number of classes; None where labels are no classes.

    Raises:
        InputError: If the model cannot take the sample, or if there is only one class.
    """
    sample = as_batch(samples, output).rows(slice(0, 1)).mapped(lambda tensor: tensor.to(device))
    with torch.no_grad(), in_evaluation_mode(model):
        outputs = output.read(call(model, sample))[0]
        n_classes = output.n_classes(outputs)
    if n_classes is not None and n_classes < 2:
        raise InputError(
            "Log-odds of a label need a model that returns one logit for each of at least 2 "
            f"classes. Found {n_classes}: for a single logit x, let the model return (0, x).",
            code="gradients.too_few_classes",
        )
    if sample.labels.ndim == 1 + (output.label_ndim or 0):
        _check_shapes(output, outputs, torch.zeros_like(sample.labels[0]))
    return n_classes


def _check_shapes(output: ModelOutput, outputs: Tensor, label: Tensor) -> None:
    """Refuse what a model returned for one sample if it doesn't fit a label of this shape."""
    try:
        value = output.value(outputs, label)
        found = f"{tuple(value.shape)}" if value.ndim else None
    except (RuntimeError, IndexError) as error:
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if found:
        raise InputError(
            f"The model output must be one number a sample. Found {found} from what the model "
            f"returned for one sample, {tuple(outputs.shape)}, and a label of shape "
            f"{tuple(label.shape)}.",
            code="gradients.output_shape",
        )


def check_labels(
    labels: Tensor, output: ModelOutput, n_classes: int | None, sample_ids: Sequence[object]
) -> None:
    """Refuse labels that the model cannot have been trained with.

    Args:
        labels: Of the samples, shape (batch, ...).
        output: The model output they are for.
        n_classes: From ``count_classes``.
        sample_ids: The samples' ids, for the message.

    Raises:
        InputError: If labels have the wrong shape; if a class is not an integer from 0 to
            n_classes - 1 (or ``IGNORED``, where a label has many parts); if a number is not
            finite; if no part of a label counts.
    """
    if output.label_ndim is None:
        return
    if labels.ndim != 1 + output.label_ndim:
        raise InputError(
            f"A label must be {_SHAPES[output.label_ndim]}. Found labels of shape "
            f"{tuple(labels.shape)}.",
            code="gradients.label_shape",
        )
    if n_classes is None:
        good = torch.isfinite(labels)
        expected = "finite numbers"
    else:
        if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
            raise InputError(
                f"Labels must be integers from 0 to {n_classes - 1}. Found {labels.dtype}.",
                code="gradients.label_dtype",
            )
        good = (labels >= 0) & (labels < n_classes)
        expected = f"integers from 0 to {n_classes - 1}, the classes of the study's model"
        if output.label_ndim:
            good |= labels == IGNORED
            expected += f", or {IGNORED} where they don't count"
    if not good.all():
        i = int((~good).nonzero()[0, 0])
        bad = labels[i][~good[i]] if output.label_ndim else labels[i]
        raise InputError(
            f"Labels must be {expected}. Found {bad.flatten()[0].item()} in sample "
            f"{sample_ids[i]}.",
            code="gradients.label_value",
        )
    if output.label_ndim:
        empty = (vmap(output.label_number)(labels) == 0).nonzero().flatten().tolist()
        if empty:
            raise InputError(
                f"A label must have a part that counts, that is not {IGNORED}; a text must have "
                f"one after its first token. Found none in sample {sample_ids[empty[0]]}.",
                code="gradients.empty_label",
            )

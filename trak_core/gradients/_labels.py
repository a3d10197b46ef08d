"""Labels must be such that the model can have been trained with them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from trak_core.errors import InputError
from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._call import call
from trak_core.gradients._per_sample import in_evaluation_mode
from trak_core.model_outputs.model_output import IGNORED, ModelOutput

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

"""What a model output is: functions of what the model returned for one sample, as data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trak_core.errors import InputError

# The label of tokens and pixels that don't count, as in torch's cross entropy.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A model output f with its loss weight, as functions of one sample's outputs and label.

    The outputs are what ``read`` took out of the model's return value, without the batch dimension.
    Every function returns a scalar, in float32 or better, and is safe under ``torch.func.vmap``.

    Attributes:
        read: The tensor of shape (batch, ...) in what the model returned.
        value: f.
        loss_weight: Q = -dl/df, l the training loss.
        curvature: W = d2l/df2; None where the loss is not a function of f alone.
        prediction: What the model predicts, in the units of ``label_number``.
        label_number: The label as one number, for tables: itself, or how many of its parts count.
        label_ndim: Dimensions of a label: 0 for a number, 1 for tokens, 2 for pixels; None if
            samples have no label.
        n_classes: From ``outputs``: how many labels exist; None if labels are no classes.
        predicts_next: Whether what the model returns at one token predicts the label of the next.
        takes_labels: Whether the model is called with the labels too, as ``labels``: an
            encoder-decoder makes its decoder's inputs of them.
    """

    read: Callable[[object], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]
    loss_weight: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor] | None
    prediction: Callable[[Tensor, Tensor], Tensor]
    label_number: Callable[[Tensor], Tensor]
    label_ndim: int | None
    n_classes: Callable[[Tensor], int | None]
    predicts_next: bool = False
    takes_labels: bool = False


@dataclass(frozen=True, slots=True)
class OfValue:
    """A function of f alone, as a function of outputs and label, for a ``ModelOutput``.

    Where f of a sample is known already, it is not computed again.

    Attributes:
        value: f of outputs and label.
        function: What this is of f, such as Q.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    function: Callable[[Tensor], Tensor]

    def __call__(self, outputs: Tensor, label: Tensor) -> Tensor:
        """Return ``function`` of f."""
        return self.function(self.value(outputs, label))


def read_logits(returned: object) -> Tensor:
    """Return the tensor that counts in what a model returned.

    That is the tensor itself; an object with ``logits`` (transformers); a mapping with ``logits``
    or ``out`` (torchvision's segmentation); or a sequence that starts with it. All else is refused.
    """
    logits = returned
    if isinstance(returned, Mapping):
        logits = returned.get("logits", returned.get("out"))
    elif isinstance(returned, Sequence) and returned:
        logits = returned[0]
    elif not isinstance(returned, Tensor):
        logits = getattr(returned, "logits", None)
    if not isinstance(logits, Tensor):
        keys = f" with {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else ""
        raise InputError(
            "The model must return a tensor, an object with `logits`, a dict with `logits` or "
            f"`out`, or a tuple that starts with the tensor. Found {type(returned).__name__}"
            f"{keys}.",
            code="model_outputs.returned",
        )
    return logits


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor whose dtype is float32 or float64: half precision cannot hold log-odds."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

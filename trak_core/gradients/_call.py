"""Calling the model once, with an explanation if it cannot take its samples."""

from torch import nn

from trak_core.errors import InputError
from trak_core.gradients._batch import Batch


def call(model: nn.Module, batch: Batch) -> object:
    """Return what the model returns for a batch.

    Raises:
        InputError: If it fails; the message names the inputs' shapes.
    """
    try:
        return batch.given_to(model)
    except (RuntimeError, TypeError, IndexError, KeyError, AttributeError, ValueError) as error:
        shapes = ", ".join(
            f"{name} {tuple(tensor.shape)}" if batch.kwargs else str(tuple(tensor.shape))
            for name, tensor in batch.tensors()
        )
        raise InputError(
            "A sample must be a tuple of the model's positional arguments and, last, the label, "
            "or a dict of its named arguments and `labels`. "
            f"Calling the model with one sample of shapes {shapes} failed: "
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            code="gradients.model_call",
        ) from error

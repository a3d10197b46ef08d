"""Outputs that are plain numbers: the prediction of a regression, or minus any loss."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.model_outputs.model_output import ModelOutput, at_least_float32, read_logits


def _value(outputs: Tensor, label: Tensor | None = None) -> Tensor:
    return at_least_float32(outputs.squeeze())


# l = (y - f)^2 / 2, so that Q is the residual and W is 1.
REGRESSION = ModelOutput(
    read=read_logits,
    value=_value,
    loss_weight=lambda outputs, label: label.squeeze() - _value(outputs),
    curvature=lambda outputs, label: torch.ones_like(_value(outputs)),
    prediction=_value,
    label_ndim=0,
)


def _read_loss(returned: object) -> Tensor:
    """Return the ``loss`` in what a model returned; without one, what stands for logits."""
    is_mapping = isinstance(returned, Mapping)
    loss = returned.get("loss") if is_mapping else getattr(returned, "loss", None)
    return loss if isinstance(loss, Tensor) else read_logits(returned)


def _minus(losses: Tensor, label: Tensor) -> Tensor:
    if losses.numel() != 1:
        raise InputError(
            "The loss must be one number a sample. Found numbers of shape "
            f"{tuple(losses.shape)} for one sample. Let the model return their sum or mean over "
            "all dimensions but the first.",
            code="gradients.output_shape",
        )
    return -at_least_float32(losses.squeeze())


# l = -f, so that Q is 1, as where nothing is said.
LOSS = ModelOutput(read=_read_loss, value=_minus, has_labels=False)

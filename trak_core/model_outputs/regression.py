"""Regression: the prediction of a model that was trained with squared error."""

import torch
from torch import Tensor

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

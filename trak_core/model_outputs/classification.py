"""Classification of images, texts or anything else: the log-odds of the label."""

import torch
from torch import Tensor

from trak_core.model_outputs.model_output import ModelOutput, at_least_float32, read_logits


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """Return log(p_y / (1 - p_y)), the log-odds of the label.

    Computed as the label's logit minus the logsumexp of the others: finite wherever logits are.
    From logits of shape (..., classes), at least two classes, and integers of shape (...) come
    numbers of shape (...), float32 or float64.

    Source: Park et al., "TRAK", ICML 2023, section 3.1.
    """
    logits, place = at_least_float32(logits), label.long().unsqueeze(-1)
    own = logits.gather(-1, place).squeeze(-1)
    others = logits.scatter(-1, place, -torch.inf)
    return own - torch.logsumexp(others, dim=-1)


def _loss_weight(logits: Tensor, label: Tensor) -> Tensor:
    # 1 - p_y; from the margin, because 1 - softmax rounds to an exact 0 for confident samples.
    return torch.sigmoid(-margin(logits, label))


def _curvature(logits: Tensor, label: Tensor) -> Tensor:
    value = margin(logits, label)
    return torch.sigmoid(value) * torch.sigmoid(-value)


# l = -log p_y = log(1 + exp(-f)).
CLASSIFICATION = ModelOutput(
    read=read_logits,
    value=margin,
    loss_weight=_loss_weight,
    curvature=_curvature,
    prediction=lambda logits, label: logits.argmax(-1),
    label_ndim=0,
    n_classes=lambda logits: logits.shape[-1] if logits.ndim else 1,
)

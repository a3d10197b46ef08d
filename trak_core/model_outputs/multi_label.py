"""Several labels a sample, each of which holds or not: the log-odds that all are as labelled."""

import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.model_outputs.language_modelling import log_odds_of_all
from trak_core.model_outputs.model_output import IGNORED, ModelOutput, at_least_float32, read_logits


def _margins(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-odds of each label as it is, and which of them count."""
    if logits.shape != labels.shape:
        raise InputError(
            "multi_label needs a logit for each label. Found logits of shape "
            f"{tuple(logits.shape)} and labels of shape {tuple(labels.shape)} for one sample.",
            code="model_outputs.labels",
        )
    return at_least_float32(torch.where(labels > 0, logits, -logits)), labels != IGNORED


def labels_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(P / (1 - P)), P = prod_k p_k the probability of all labels as they are.

    p_k is sigmoid(z_k) where the label is 1, sigmoid(-z_k) where it is 0. With l = -log P, the sum
    of the labels' binary cross entropies, l = log(1 + exp(-f)). Finite wherever logits are; a
    scalar, float32 or float64.

    Logits and labels have the same shape. Labels are 1, 0 or ``IGNORED`` (-100); one must count.

    Source: Park et al., "TRAK", ICML 2023, section 3.1, with the set of labels as the class.
    """
    return log_odds_of_all(*_margins(logits, labels))


def _loss_weight(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(-labels_log_odds(logits, labels))


def _curvature(logits: Tensor, labels: Tensor) -> Tensor:
    f = labels_log_odds(logits, labels)
    return torch.sigmoid(f) * torch.sigmoid(-f)


def _labels_right(logits: Tensor, labels: Tensor) -> Tensor:
    margins, counted = _margins(logits, labels)
    return (counted & (margins > 0)).sum().float()


MULTI_LABEL = ModelOutput(
    read=read_logits,
    value=labels_log_odds,
    loss_weight=_loss_weight,
    curvature=_curvature,
    prediction=_labels_right,
    label_number=lambda labels: (labels != IGNORED).sum(),
    n_classes=lambda logits: 2,
)

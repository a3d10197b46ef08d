"""Causal language modelling: the log-odds of a sequence."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trak_core.model_outputs.classification import margin
from trak_core.model_outputs.model_output import IGNORED, ModelOutput, read_logits

# Margins above it: log(1 + e) for e = exp(-margin) by its series, exact to float64's rounding.
_CONFIDENT = 15.0
# Losses below it: the same for exp(loss) - 1.
_FITTED = 1e-3


def _shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels and which of them count: position t predicts the token at t + 1."""
    labels = labels[1:]
    counted = labels != IGNORED
    return logits[:-1], torch.where(counted, labels, 0), counted


def _log_loss_of_token(margins: Tensor) -> Tensor:
    """Return log(-log p) of tokens from their margins, also where p rounds to 1."""
    confident = margins > _CONFIDENT
    e = torch.exp(-torch.where(confident, margins, _CONFIDENT))
    series = -margins - e / 2 + 5 * e**2 / 24
    # Each branch sees harmless numbers where the other is taken: no NaN in either's gradient.
    plain = torch.log(softplus(-torch.where(confident, _CONFIDENT, margins)))
    return torch.where(confident, series, plain)


def sequence_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(P / (1 - P)), P = prod_t p_t the probability of the labelled tokens.

    With l = -log P, the sum of the tokens' cross entropies, f = -log(exp(l) - 1), so that the loss
    is a function of f as for a single label: l = log(1 + exp(-f)). For long texts f tends to
    log P; for one token it is that token's margin. Finite wherever logits are; a scalar, float32 or
    float64.

    Row t of logits, shape (tokens, vocabulary), predicts the token at t + 1. Labels, shape
    (tokens,), are the tokens themselves, ``IGNORED`` (-100) where they don't count (padding, a
    prompt). The first is never predicted; one more must count.

    Source: Park et al., "TRAK", ICML 2023, section 3.1, with the sequence as the class.
    """
    logits, labels, counted = _shifted(logits, labels)
    margins = margin(logits, labels)
    loss = torch.where(counted, softplus(-margins), 0).sum()
    log_loss = torch.logsumexp(
        torch.where(counted, _log_loss_of_token(margins), -torch.inf), dim=-1
    )
    fitted = loss < _FITTED
    # log(exp(l) - 1) = log l + l / 2 + l^2 / 24 - ...
    small = -(log_loss + loss / 2 + loss**2 / 24)
    plain = torch.where(fitted, 1, loss)
    return torch.where(fitted, small, -plain - torch.log(-torch.expm1(-plain)))


def _loss_weight(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(-sequence_log_odds(logits, labels))


def _curvature(logits: Tensor, labels: Tensor) -> Tensor:
    value = sequence_log_odds(logits, labels)
    return torch.sigmoid(value) * torch.sigmoid(-value)


def _tokens_right(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels, counted = _shifted(logits, labels)
    return (counted & (logits.argmax(-1) == labels)).sum().float()


LANGUAGE_MODELLING = ModelOutput(
    read=read_logits,
    value=sequence_log_odds,
    loss_weight=_loss_weight,
    curvature=_curvature,
    prediction=_tokens_right,
    label_number=lambda labels: (labels[1:] != IGNORED).sum(),
    label_ndim=1,
    n_classes=lambda logits: logits.shape[-1] if logits.ndim else 1,
)

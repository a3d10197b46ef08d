"""Model outputs of causal, masked and sequence-to-sequence language models."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from trak_core.model_outputs.model_output import IGNORED, ModelOutput, OfValue, read_logits
from trak_core.model_outputs.supervised import (
    counted_margins,
    log_odds_of_all,
    mean_loss_weight,
    probability_curvature,
    probability_weight,
    softmax_noise,
)
from trak_core.runtime.progress import print_line


def labelled_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(P / (1 - P)), where P = prod_t p_t is the probability of the labelled tokens.

    The result is f = -log(exp(l) - 1), where l = -log P is the sum of the tokens' cross entropies.
    Therefore l = log(1 + exp(-f)), as for a single label. f is a scalar, float32 or float64, and
    finite for finite logits.

    Row t of the logits, shape (tokens, vocabulary), predicts label t. Labels, shape (tokens,), are
    token ids or ``IGNORED`` (-100). At least one label must not be ignored.

    Source: Park et al., "TRAK", ICML 2023, section 3.1, with the sequence as the class.
    """
    return log_odds_of_all(*counted_margins(logits, labels))


def _of_tokens(ahead: int, *, takes_labels: bool = False) -> ModelOutput:
    """Return the model output for models whose logits at token t predict label t + ``ahead``."""

    def value(logits: Tensor, labels: Tensor) -> Tensor:
        return labelled_log_odds(logits[: len(logits) - ahead], labels[ahead:])

    def tokens_right(logits: Tensor, labels: Tensor) -> Tensor:
        predicted = logits[: len(logits) - ahead].max(-1).indices  # faster than argmax
        counted = labels[ahead:] != IGNORED
        return (counted & (predicted == labels[ahead:])).sum().float()

    def noise(logits: Tensor, labels: Tensor, uniform: Tensor) -> Tensor:
        n = len(logits) - ahead
        counted = (labels[ahead:] != IGNORED).unsqueeze(-1)
        drawn = torch.where(counted, softmax_noise(logits[:n], uniform[ahead:]), 0)
        return torch.cat([drawn, torch.zeros_like(logits[n:], dtype=drawn.dtype)])

    return ModelOutput(
        read=read_logits,
        value=value,
        loss_weight=OfValue(value, probability_weight),
        curvature=OfValue(value, probability_curvature),
        prediction=tokens_right,
        label_number=lambda labels: (labels[ahead:] != IGNORED).sum(),
        label_ndim=1,
        n_classes=lambda logits: logits.shape[-1] if logits.ndim else 1,
        predicts_next=ahead == 1,
        takes_labels=takes_labels,
        joins_tokens=True,
        loss_noise=noise,
    )


def tokens_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the log-odds log(p_t / (1 - p_t)) of all labels, float32 or float64.

    Row t of the logits predicts label t + 1. ``IGNORED`` labels are skipped. Unlike in
    ``labelled_log_odds``, all tokens count equally, however confident the model is.

    Source: the margin in Park et al., "TRAK", ICML 2023, section 3.1, applied to each token.
    """
    margins, counted = counted_margins(logits[:-1], labels[1:])
    return torch.where(counted, margins, 0).sum()


LANGUAGE_MODELLING = _of_tokens(1)
TOKEN_LOG_ODDS = replace(
    LANGUAGE_MODELLING,
    value=tokens_log_odds,
    loss_weight=lambda logits, labels: mean_loss_weight(logits[:-1], labels[1:]),
    curvature=None,
    joins_tokens=False,
)
MASKED_LANGUAGE_MODELLING = _of_tokens(0)
SEQUENCE_TO_SEQUENCE = _of_tokens(0, takes_labels=True)


def of_margins(output: ModelOutput, n_classes: Callable[[], int | None]) -> ModelOutput:
    """Return the same model output for a model that returns log-odds of labels instead of logits.

    Such a model need not store all logits of a text. It must return a tensor of shape (batch,
    tokens, 2). For each predicted token, the tensor contains the log-odds of the label, and 1 if
    the label is the most likely token, else 0. After the model has been called, ``n_classes`` must
    return the size of the vocabulary.
    """
    ahead = int(output.predicts_next)

    def value(tokens: Tensor, labels: Tensor) -> Tensor:
        return log_odds_of_all(tokens[:, 0], labels[ahead:] != IGNORED)

    def tokens_right(tokens: Tensor, labels: Tensor) -> Tensor:
        return ((labels[ahead:] != IGNORED) & (tokens[:, 1] > 0)).sum().float()

    return replace(
        output,
        value=value,
        loss_weight=OfValue(value, probability_weight),
        curvature=OfValue(value, probability_curvature),
        prediction=tokens_right,
        n_classes=lambda tokens: n_classes(),
        loss_noise=None,
    )


def warn_of_masked_model(output: ModelOutput, model: nn.Module) -> None:
    """Print a warning if the model output of causal models is used for a masked model."""
    names = sorted({type(module).__name__ for module in model.modules()})
    masked = [name for name in names if name.endswith("ForMaskedLM")]
    if output is LANGUAGE_MODELLING and masked:
        print_line(
            f"Warning: {masked[0]} is a masked language model. It also sees the tokens after the "
            "token to predict, so the log-odds of a whole text mean little. Use `model_output: "
            "masked_language_modelling`, with labels for masked tokens and -100 for other tokens."
        )

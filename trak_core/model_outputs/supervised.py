"""Model outputs of supervised models: log-odds of labels, predicted numbers, or minus a loss."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trak_core.errors import InputError
from trak_core.model_outputs.model_output import IGNORED, ModelOutput, at_least_float32, read_logits

# Above this margin, log(log(1 + e)) with e = exp(-margin) is computed by a power series, because e
# may underflow.
_CONFIDENT = 15.0
# Below this loss, log(exp(loss) - 1) is computed by a power series, because the loss may underflow.
_FITTED = 1e-3


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """Return log(p_y / (1 - p_y)), the log-odds of the label, shape (...), float32 or float64.

    The log-odds are the label's logit minus the logsumexp of all other logits. They are finite for
    finite logits. Logits have shape (..., classes), with at least two classes. Labels are integers
    of shape (...).

    Source: Park et al., "TRAK", ICML 2023, section 3.1.
    """
    logits, index = at_least_float32(logits), label.long().unsqueeze(-1)
    logit = logits.gather(-1, index).squeeze(-1)
    others = logits.scatter(-1, index, -torch.inf)
    return logit - torch.logsumexp(others, dim=-1)


def probability_weight(f: Tensor) -> Tensor:
    """Return 1 - p for the probability p with log-odds f, accurately even if p rounds to 1."""
    return torch.sigmoid(-f)


def probability_curvature(f: Tensor) -> Tensor:
    """Return p (1 - p) for the probability p with log-odds f."""
    return torch.sigmoid(f) * torch.sigmoid(-f)


def softmax_noise(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return z = onehot(y) - softmax(logits), with labels y drawn from the softmax.

    Labels are drawn by inverse transform sampling with random numbers ``uniform`` in [0, 1), shape
    (...). Logits and z have shape (..., classes). With p = softmax(logits), E[z z^T] =
    diag(p) - p p^T is the Hessian of -log p_y. The result is float32 or float64.
    """
    p = at_least_float32(logits).softmax(-1)
    drawn = (p.cumsum(-1) <= uniform.unsqueeze(-1)).sum(-1, keepdim=True)
    # Because of rounding, a random number may exceed the sum of all probabilities.
    drawn = drawn.clamp(max=p.shape[-1] - 1)
    return (torch.arange(p.shape[-1], device=p.device) == drawn).to(p.dtype) - p


# The loss is l = -log p_y = log(1 + exp(-f)), so the loss weight -dl/df is 1 - p_y.
CLASSIFICATION = ModelOutput(
    read=read_logits,
    value=margin,
    loss_weight=lambda logits, label: probability_weight(margin(logits, label)),
    curvature=lambda logits, label: probability_curvature(margin(logits, label)),
    prediction=lambda logits, label: logits.argmax(-1),
    label_ndim=0,
    n_classes=lambda logits: logits.shape[-1] if logits.ndim else 1,
    loss_noise=lambda logits, label, uniform: softmax_noise(logits, uniform),
)


def _log_loss_of_token(margins: Tensor) -> Tensor:
    """Return log(-log p) for log-odds ``margins`` of p, accurately even if p rounds to 1."""
    confident = margins > _CONFIDENT
    e = torch.exp(-torch.where(confident, margins, _CONFIDENT))
    series = -margins - e / 2 + 5 * e**2 / 24
    # Each branch gets harmless values where ``where`` selects the other branch. Otherwise, the
    # unused branch's gradient could be NaN, and so would be the gradient of the result.
    plain = torch.log(softplus(-torch.where(confident, _CONFIDENT, margins)))
    return torch.where(confident, series, plain)


def log_odds_of_all(margins: Tensor, counted: Tensor) -> Tensor:
    """Return log(P / (1 - P)), where P is the product of probabilities with log-odds ``margins``.

    Only entries for which ``counted`` is True are used. The result is a scalar.
    """
    margins, counted = margins.flatten(), counted.flatten()
    loss = torch.where(counted, softplus(-margins), 0).sum()
    log_loss = torch.logsumexp(
        torch.where(counted, _log_loss_of_token(margins), -torch.inf), dim=-1
    )
    fitted = loss < _FITTED
    # For the loss l, the result is -log(exp(l) - 1) = -(log l + l / 2 + l^2 / 24 - ...).
    small = -(log_loss + loss / 2 + loss**2 / 24)
    plain = torch.where(fitted, 1, loss)
    return torch.where(fitted, small, -plain - torch.log(-torch.expm1(-plain)))


def counted_margins(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-odds of labels, and a mask that is False for ``IGNORED`` labels."""
    counted = labels != IGNORED
    return margin(logits, torch.where(counted, labels, 0)), counted


def mean_counted(numbers: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the numbers for which ``counted`` is True."""
    return torch.where(counted, numbers, 0).sum() / counted.sum()


def mean_loss_weight(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of 1 - p over labels that are not ``IGNORED``, for label probabilities p.

    Let f be the sum or mean of the log-odds, and l the sum or mean of the cross entropies. If all
    log-odds change by the same amount, the result is -dl/df.
    """
    margins, counted = counted_margins(logits, labels)
    return mean_counted(torch.sigmoid(-margins), counted)


def mean_pixel_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the log-odds log(p / (1 - p)) of all labels, float32 or float64.

    Logits have shape (classes, height, width). Labels, shape (height, width), are classes or
    ``IGNORED`` (-100). At least one label must not be ignored.

    Source: the margin in Park et al., "TRAK", ICML 2023, section 3.1, applied to each pixel.
    """
    return mean_counted(*counted_margins(logits.movedim(0, -1), labels))


def _pixels_noise(logits: Tensor, labels: Tensor, uniform: Tensor) -> Tensor:
    counted = labels != IGNORED
    noise = softmax_noise(logits.movedim(0, -1), uniform).movedim(-1, 0)
    return torch.where(counted, noise, 0) / counted.sum().sqrt()


SEGMENTATION = ModelOutput(
    read=read_logits,
    value=mean_pixel_margin,
    loss_weight=lambda logits, labels: mean_loss_weight(logits.movedim(0, -1), labels),
    curvature=None,
    prediction=lambda logits, labels: (logits.argmax(0) == labels).sum().float(),
    label_number=lambda labels: (labels != IGNORED).sum(),
    label_ndim=2,
    n_classes=lambda logits: logits.shape[0] if logits.ndim else 1,
    loss_noise=_pixels_noise,
)


def _margins(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-odds of each label's value (0 or 1), and a mask of labels that count."""
    if logits.shape != labels.shape:
        raise InputError(
            "The model output multi_label needs one logit for each label. Found logits of shape "
            f"{tuple(logits.shape)} and labels of shape {tuple(labels.shape)} for one sample.",
            code="model_outputs.labels",
        )
    return at_least_float32(torch.where(labels > 0, logits, -logits)), labels != IGNORED


def labels_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(P / (1 - P)), where P = prod_k p_k is the joint probability of the labels' values.

    p_k is sigmoid(z_k) for logit z_k if label k is 1, and sigmoid(-z_k) if it is 0. The sum of the
    binary cross entropies is -log P = log(1 + exp(-f)), where f is the result. The result is a
    scalar, float32 or float64, and finite for finite logits.

    Logits and labels have the same shape. Labels are 1, 0 or ``IGNORED`` (-100). At least one label
    must not be ignored.

    Source: Park et al., "TRAK", ICML 2023, section 3.1, with the set of labels as the class.
    """
    return log_odds_of_all(*_margins(logits, labels))


def _labels_right(logits: Tensor, labels: Tensor) -> Tensor:
    margins, counted = _margins(logits, labels)
    return (counted & (margins > 0)).sum().float()


def _labels_noise(logits: Tensor, labels: Tensor, uniform: Tensor) -> Tensor:
    p = torch.sigmoid(at_least_float32(logits))
    return torch.where(labels != IGNORED, (uniform < p).to(p.dtype) - p, 0)


MULTI_LABEL = ModelOutput(
    read=read_logits,
    value=labels_log_odds,
    loss_weight=lambda logits, labels: probability_weight(labels_log_odds(logits, labels)),
    curvature=lambda logits, labels: probability_curvature(labels_log_odds(logits, labels)),
    prediction=_labels_right,
    label_number=lambda labels: (labels != IGNORED).sum(),
    n_classes=lambda logits: 2,
    loss_noise=_labels_noise,
)


def _value(outputs: Tensor, _: Tensor | None = None) -> Tensor:
    return at_least_float32(outputs.squeeze())


def _sign(outputs: Tensor, _: Tensor, uniform: Tensor) -> Tensor:
    """Return 1 or -1 with equal probability, so that the mean is 0 and the mean square is 1."""
    signs = torch.where(uniform < 0.5, -1.0, 1.0).reshape(outputs.shape)
    return signs.to(at_least_float32(outputs).dtype)


# The loss is l = (y - f)^2 / 2, so the loss weight is the residual y - f, and the curvature is 1.
REGRESSION = ModelOutput(
    read=read_logits,
    value=_value,
    loss_weight=lambda outputs, label: label.squeeze() - _value(outputs),
    curvature=lambda outputs, label: torch.ones_like(_value(outputs)),
    prediction=_value,
    label_ndim=0,
    loss_noise=_sign,
)


def _read_loss(returned: object) -> Tensor:
    """Return the ``loss`` in a model's return value, or else the result of ``read_logits``."""
    is_mapping = isinstance(returned, Mapping)
    loss = returned.get("loss") if is_mapping else getattr(returned, "loss", None)
    return loss if isinstance(loss, Tensor) else read_logits(returned)


def _minus(losses: Tensor, label: Tensor) -> Tensor:
    if losses.numel() != 1:
        raise InputError(
            "The loss must be one number for each sample. Found a loss of shape "
            f"{tuple(losses.shape)} for one sample. Let the model return the sum or mean over all "
            "dimensions except the first.",
            code="gradients.output_shape",
        )
    return -at_least_float32(losses.squeeze())


# The loss is l = -f, so the loss weight is 1, which is the default.
LOSS = ModelOutput(read=_read_loss, value=_minus, has_labels=False)

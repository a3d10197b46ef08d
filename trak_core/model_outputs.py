"""Model output functions: the number f(z; theta) that attribution explains, and its loss weight.

One sample is a tuple whose last entry is the label and whose other entries are the model's
positional arguments. What the model returns for that one sample (a tensor, or an object with
``logits``) goes to ``value`` without its batch dimension. All functions are safe under
``torch.func.vmap``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A model output f as data: four functions of one sample, each returning a scalar.

    Attributes:
        value: f from what the model returned and the label.
        prediction: What the model predicts, in the units of the label.
        loss_weight: Q = -dl/df from f and the label, l the training loss.
        curvature: W = d2l/df2 from f and the label.
        n_classes: Of what the model returned: how many labels exist; None if labels are numbers.
        unit: Of f, in plain words.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    prediction: Callable[[Tensor], Tensor]
    loss_weight: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor]
    n_classes: Callable[[Tensor], int | None]
    unit: str


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """Return log(p_y / (1 - p_y)), the log-odds of the label, from logits of shape (classes,).

    Computed as the label's logit minus the logsumexp of the others: finite wherever logits are.

    Source: Park et al., "TRAK", ICML 2023, section 3.1.
    """
    is_label = torch.arange(logits.shape[-1], device=logits.device) == label
    own = torch.where(is_label, logits, 0).sum()
    others = torch.where(is_label, -torch.inf, logits)
    return own - torch.logsumexp(others, dim=-1)


_CLASSIFICATION = ModelOutput(
    value=margin,
    prediction=lambda logits: logits.argmax(-1),
    # 1 - p_y; from the margin, because 1 - softmax rounds to an exact 0 for confident samples.
    loss_weight=lambda value, label: torch.sigmoid(-value),
    curvature=lambda value, label: torch.sigmoid(value) * torch.sigmoid(-value),
    n_classes=lambda logits: logits.shape[-1],
    unit="log-odds of the label",
)

# l = (y - f)^2 / 2, so that Q is the residual and W is 1.
_REGRESSION = ModelOutput(
    value=lambda outputs, label: outputs.squeeze(),
    prediction=lambda outputs: outputs.squeeze(),
    loss_weight=lambda value, label: label.squeeze() - value,
    curvature=lambda value, label: torch.ones_like(value),
    n_classes=lambda outputs: None,
    unit="that of the model's prediction",
)

MODEL_OUTPUTS = {"image_classification": _CLASSIFICATION, "regression": _REGRESSION}

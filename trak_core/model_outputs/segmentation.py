"""Segmentation of images: the mean over pixels of the log-odds of their labels."""

import torch
from torch import Tensor

from trak_core.model_outputs.classification import margin
from trak_core.model_outputs.model_output import IGNORED, ModelOutput, read_logits


def _pixels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the margin of every pixel, and which of them count."""
    counted = labels != IGNORED
    return margin(logits.movedim(0, -1), torch.where(counted, labels, 0)), counted


def _mean(numbers: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, numbers, 0).sum() / counted.sum()


def mean_pixel_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the labelled pixels' log-odds log(p / (1 - p)), float32 or float64.

    Logits have shape (classes, height, width), labels (height, width), with ``IGNORED`` (-100)
    where a pixel doesn't count; one must.

    Source: the margin of Park et al., "TRAK", ICML 2023, section 3.1, a pixel at a time.
    """
    return _mean(*_pixels(logits, labels))


def _loss_weight(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of 1 - p: -dl/df as all margins move alike, l the mean cross entropy."""
    margins, counted = _pixels(logits, labels)
    return _mean(torch.sigmoid(-margins), counted)


def _pixels_right(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(0) == labels).sum().float()


SEGMENTATION = ModelOutput(
    read=read_logits,
    value=mean_pixel_margin,
    loss_weight=_loss_weight,
    curvature=None,
    prediction=_pixels_right,
    label_number=lambda labels: (labels != IGNORED).sum(),
    label_ndim=2,
    n_classes=lambda logits: logits.shape[0] if logits.ndim else 1,
)

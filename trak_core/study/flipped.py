"""Training samples with some labels wrong on purpose."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trak_core.errors import InputError
from trak_core.study.draws import flipped_labels
from trak_core.study.study import Samples, Split


@dataclass(frozen=True, slots=True)
class _Flipped:
    """Samples whose labels are replaced as they are read."""

    samples: Samples
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        # A sequence ends with an IndexError, which numpy raises.
        label = int(self.labels[index])
        sample = self.samples[index]
        if isinstance(sample, Mapping):
            return {**sample, "labels": _like(sample["labels"], label)}
        return (*sample[:-1], _like(sample[-1], label))


def _like(old: Any, label: int) -> Any:
    """Return a label of the type of the one it replaces."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, label)
    return np.full_like(old, label) if isinstance(old, np.ndarray) else type(old)(label)


def class_labels(split: Split) -> np.ndarray:
    """Read the label of every sample.

    Args:
        split: The samples.

    Returns:
        Integers, shape (n,).

    Raises:
        InputError: If a label is not an integer.
    """
    labels = []
    for i in range(len(split.ids)):
        sample = split.samples[i]
        label = torch.as_tensor(sample["labels"] if isinstance(sample, Mapping) else sample[-1])
        if label.ndim or label.is_floating_point():
            raise InputError(
                "Labels to be flipped must be integers, one a sample. Found shape "
                f"{tuple(label.shape)} of {label.dtype} in sample {split.ids[i]}."
            )
        labels.append(int(label))
    return np.array(labels)


def with_flipped_labels(split: Split, fraction: float, seed: int) -> Split:
    """Flip a random part of the labels (see ``flipped_labels``).

    Args:
        split: Samples whose labels are classes.
        fraction: Part of the samples.
        seed: Of the draw.

    Returns:
        The same samples and ids, with other labels.

    Raises:
        InputError: If labels are not integers, or all the same.
    """
    labels = class_labels(split)
    if len(np.unique(labels)) < 2:
        raise InputError(
            f"Labels to be flipped must be of two classes or more. Found {labels[0]} only."
        )
    return Split(_Flipped(split.samples, flipped_labels(labels, fraction, seed)), split.ids)

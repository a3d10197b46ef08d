"""Which sample each entry of a tensor belongs to, as one integer: the layout.

A layout s says that the entry at row-major position i belongs to sample (i // s) % B. It survives
any reshape, since that keeps positions; everything else is arithmetic on the dimension it lies in.
``None`` stands for a tensor that all samples share, or whose layout nobody knows: then no entry is
taken for one sample's alone, which costs time but is never wrong.
"""

import math
from collections.abc import Sequence

Layout = int | None


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in entries."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def layout_at(shape: Sequence[int], dim: int, width: int, n_samples: int) -> Layout:
    """Return the layout of a tensor whose samples lie along one dimension.

    Args:
        shape: The tensor's.
        dim: The dimension, which is read as (outer, n_samples, width).
        width: Consecutive places along ``dim`` of one sample.
        n_samples: B.

    Returns:
        The layout; None if the dimension's size doesn't allow it.
    """
    if not 0 <= dim < len(shape) or shape[dim] % (n_samples * width) or not shape[dim]:
        return None
    return width * math.prod(shape[dim + 1 :])


def locate(shape: Sequence[int], layout: int, n_samples: int) -> tuple[int, int] | None:
    """Return the dimension that the samples lie along and the width, as in ``layout_at``.

    Returns:
        Dimension and width; None where samples are spread over several dimensions.
    """
    for dim, stride in enumerate(strides(shape)):
        if stride <= layout < stride * shape[dim]:
            width = layout // stride
            if layout % stride or shape[dim] % (width * n_samples):
                return None
            return dim, width
    return None

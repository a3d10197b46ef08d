"""How far a projection keeps norms and inner products, beside what theory says; NumPy only.

Every kind of projection is unbiased. Most keep some of the coordinates exactly where they are
alone: a single one (``rademacher``, ``sjlt``: its entries square to one number), or each block of
proj_dim consecutive ones (``hadamard``: orthogonal within a block). Errors come from pairs of
different blocks b, and over the choice of the matrix

    Var <Rx, Ry> = (|x|^2 |y|^2 + <x, y>^2 - sum_b (|x_b|^2 |y_b|^2 + <x_b, y_b>^2)) / k,

where ``normal`` has nothing to take off. Source: for ``rademacher`` Achlioptas, JCSS 2003; for the
others the same sum over pairs, with the buckets of independent stripes for ``sjlt`` and with the
blocks' own signs for ``hadamard``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from trak_core.errors import InputError

# Coordinates that are looked at together: a few MiB for hundreds of gradients.
_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Agreement:
    """Errors of one kind, measured and predicted; each a root mean square, relative.

    Attributes:
        measured: Over all samples or pairs, and over the streams: its square is an unbiased
            estimate of the square of ``predicted``, if theory holds.
        standard_error: Of ``measured``, from how the streams differ; NaN for one stream.
        predicted: What theory says.
        by_stream: Over all samples or pairs, for each stream.
    """

    measured: float
    standard_error: float
    predicted: float
    by_stream: tuple[float, ...]


def squared_norm_agreement(
    gramian: np.ndarray, streams: Sequence[np.ndarray], predicted_sd: np.ndarray
) -> Agreement:
    """Compare squared norms of projected gradients with the exact ones.

    Samples share one matrix, so that their errors go together: the standard error runs over
    matrices of independent streams.

    Args:
        gramian: Exact inner products of the gradients, shape (n, n), a positive diagonal.
        streams: Scaled features of the same samples, (n, k) for each stream.
        predicted_sd: From ``inner_product_sd``, shape (n, n); its diagonal counts.

    Returns:
        Errors relative to the squared norms.

    Raises:
        InputError: If a gradient is zero, or if there is no stream.
    """
    exact = _squared_norms(gramian)
    errors = (np.einsum("ij,ij->i", rows, rows, dtype=np.float64) / exact - 1 for rows in streams)
    return _agreement(errors, np.diagonal(predicted_sd))


def inner_product_agreement(
    gramian: np.ndarray, streams: Sequence[np.ndarray], predicted_sd: np.ndarray
) -> Agreement:
    """Compare inner products of projected gradients with the exact ones.

    Args:
        gramian: As for ``squared_norm_agreement``, of at least two samples.
        streams: As for ``squared_norm_agreement``.
        predicted_sd: As for ``squared_norm_agreement``; what is off its diagonal counts.

    Returns:
        Errors relative to the product of the norms, over all pairs of different samples.

    Raises:
        InputError: If a gradient is zero, if there is no stream, or fewer than two samples.
    """
    if len(gramian) < 2:
        raise InputError(
            f"Inner products need at least two samples. Found {len(gramian)}. Take more rows."
        )
    norms = np.sqrt(_squared_norms(gramian))
    pairs = np.triu_indices(len(gramian), 1)
    scale, exact = np.outer(norms, norms)[pairs], gramian[pairs]
    errors = ((inner_products(rows)[pairs] - exact) / scale for rows in streams)
    return _agreement(errors, predicted_sd[pairs])


def inner_products(rows: np.ndarray) -> np.ndarray:
    """Return the inner products of features, shape (n, k), summed in float64: shape (n, n)."""
    wide = rows.astype(np.float64)
    return wide @ wide.T


def peakedness(x: np.ndarray, y: np.ndarray, block: int) -> np.ndarray:
    """Return sum_b (|x_b|^2 |y_b|^2 + <x_b, y_b>^2) / 2 (|x| |y|)^2 for all pairs of gradients.

    How far a few blocks of coordinates dominate: 1 for a vector with itself if it lies in one
    block, of the order of block/p for dense ones. For blocks of one coordinate it is
    sum x^2 y^2 / (|x| |y|)^2, and sum x^4 / |x|^4 of a vector with itself.

    Args:
        x: Gradients, shape (n, p), none zero.
        y: Gradients, shape (m, p), none zero.
        block: Coordinates of a block b, ``ProjectionSpec.lossless_block``; the last may have fewer.

    Returns:
        Shape (n, m), float64.
    """
    products = np.zeros((len(x), len(y)))
    x_norms, y_norms = np.zeros(len(x)), np.zeros(len(y))
    step = block * max(1, _COLUMNS // block)
    for first in range(0, x.shape[1], step):
        a, b = (rows[:, first : first + step].astype(np.float64) for rows in (x, y))
        starts = np.arange(0, a.shape[1], block)
        a_norms, b_norms = (np.add.reduceat(rows**2, starts, axis=1) for rows in (a, b))
        outer = a_norms @ b_norms.T
        products += outer
        if block == 1:
            products += outer
        else:
            for start in starts:
                within = slice(start, start + block)
                products += (a[:, within] @ b[:, within].T) ** 2
        x_norms += a_norms.sum(axis=1)
        y_norms += b_norms.sum(axis=1)
    return products / (2 * np.outer(x_norms, y_norms))


def spread_norm_sd(proj_dim: int) -> float:
    """Return the standard deviation of |Rx|^2 / |x|^2 for a gradient spread over many blocks.

    sqrt(2/k), what ``inner_product_sd`` has on its diagonal without peaks.
    """
    return sqrt(2 / proj_dim)


def inner_product_sd(proj_dim: int, gramian: np.ndarray, peaks: np.ndarray) -> np.ndarray:
    """Return the standard deviation of <Rx, Ry> / (|x| |y|), of |Rx|^2 / |x|^2 on the diagonal.

    sqrt((1 + cos^2 - 2 peak) / k): for a squared norm sqrt((2/k) (1 - peak)).

    Args:
        proj_dim: k.
        gramian: Exact inner products, shape (n, n).
        peaks: From ``peakedness``, shape (n, n); zeros where no block is kept.

    Returns:
        Shape (n, n); 0 where the projection makes no error.

    Raises:
        InputError: If a gradient is zero.
    """
    squared = _squared_norms(gramian)
    squared_cosine = gramian**2 / np.outer(squared, squared)
    # Rounding may fall below the 0 of gradients within one block.
    return np.sqrt(np.maximum(1 + squared_cosine - 2 * peaks, 0) / proj_dim)


def _squared_norms(gramian: np.ndarray) -> np.ndarray:
    squared = np.diagonal(gramian)
    if not (squared > 0).all():
        raise InputError(
            "Relative errors need gradients that aren't zero. Found zero for the rows "
            f"{np.flatnonzero(~(squared > 0))[:8].tolist()}. Leave these samples out."
        )
    return squared


def _agreement(errors: Iterator[np.ndarray], predicted_sd: np.ndarray) -> Agreement:
    squares = np.array([np.mean(error**2) for error in errors])
    n = len(squares)
    if not n:
        raise InputError("Distortion needs the features of at least one stream. Found none.")
    measured = np.sqrt(squares.mean())
    spread = np.nan if n == 1 else squares.std(ddof=1) / np.sqrt(n)
    # Of a root: half the relative error of what is under it. Without any error there is no spread.
    error = spread / (2 * measured) if measured > 0 or n == 1 else 0.0
    predicted = np.sqrt(np.mean(predicted_sd**2))
    by_stream = tuple(np.sqrt(squares).tolist())
    return Agreement(float(measured), float(error), float(predicted), by_stream)

"""How far a projection keeps norms and inner products, beside what theory says; NumPy only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Agreement:
    """Errors of one kind, measured and predicted; each a root mean square, relative.

    Attributes:
        measured: Over all samples or pairs, averaged over the streams.
        standard_error: Of ``measured``, from how streams differ; NaN for one stream.
        predicted: What theory says.
        n_streams: How many projection matrices there were.
    """

    measured: float
    standard_error: float
    predicted: float
    n_streams: int


def squared_norm_agreement(
    kernel: np.ndarray, streams: Sequence[np.ndarray], predicted_sd: np.ndarray
) -> Agreement:
    """Compare squared norms of projected gradients with the exact ones.

    Samples share one matrix, so that their errors go together: the standard error runs over
    matrices of independent streams.

    Args:
        kernel: Exact inner products of the gradients, shape (n, n), a positive diagonal.
        streams: Scaled features of the same samples, (n, k) for each stream.
        predicted_sd: From ``norm_sd``, shape (n,).

    Returns:
        Errors relative to the squared norms.

    Raises:
        InputError: If a gradient is zero, or if there is no stream.
    """
    exact = _squared_norms(kernel)
    errors = [np.einsum("ij,ij->i", rows, rows, dtype=np.float64) / exact - 1 for rows in streams]
    return _agreement(errors, predicted_sd)


def inner_product_agreement(
    kernel: np.ndarray, streams: Sequence[np.ndarray], predicted_sd: np.ndarray
) -> Agreement:
    """Compare inner products of projected gradients with the exact ones.

    Args:
        kernel: As for ``squared_norm_agreement``, of at least two samples.
        streams: As for ``squared_norm_agreement``.
        predicted_sd: From ``inner_product_sd``, shape (n, n).

    Returns:
        Errors relative to the product of the norms, over all pairs of different samples.

    Raises:
        InputError: If a gradient is zero, if there is no stream, or fewer than two samples.
    """
    if len(kernel) < 2:
        raise InputError(
            f"Inner products need at least two samples. Found {len(kernel)}. Take more rows."
        )
    norms = np.sqrt(_squared_norms(kernel))
    pairs = np.triu_indices(len(kernel), 1)
    scale = np.outer(norms, norms)[pairs]
    errors = []
    for rows in streams:
        wide = rows.astype(np.float64)
        errors.append(((wide @ wide.T)[pairs] - kernel[pairs]) / scale)
    return _agreement(errors, predicted_sd[pairs])


def peakedness(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Return sum x^2 y^2 / (|x| |y|)^2 for all pairs of gradients.

    How far a few coordinates dominate: 1 for vectors with the same single entry, of the order of
    1/p for dense ones. On the diagonal it is sum x^4 / |x|^4.

    Args:
        blocks: Coordinates of the n gradients as they come, shape (n, some of p) each; at least
            one, and no gradient zero.

    Returns:
        Shape (n, n), float64.
    """
    products, norms = np.zeros(()), np.zeros(())
    for block in blocks:
        squares = np.square(block.astype(np.float64))
        products = products + squares @ squares.T
        norms = norms + squares.sum(axis=1)
    return products / np.outer(norms, norms)


def norm_sd(proj_dim: int, peaks: np.ndarray) -> np.ndarray:
    """Return the standard deviation of |Rx|^2 / |x|^2.

    sqrt(2/k) for normal entries; sqrt((2/k) (1 - sum x^4 / |x|^4)) for rademacher ones, which are
    exact for vectors with one entry.

    Args:
        proj_dim: k.
        peaks: sum x^4 / |x|^4 of each vector for rademacher, the diagonal of ``peakedness``; zeros
            for normal.

    Returns:
        The shape of ``peaks``.
    """
    return np.sqrt(2 / proj_dim * (1 - peaks))


def inner_product_sd(
    proj_dim: int, kernel: np.ndarray, peaks: np.ndarray | None = None
) -> np.ndarray:
    """Return the standard deviation of <Rx, Ry> / (|x| |y|).

    sqrt((1 + cos^2) / k) for normal entries; for rademacher ones 2 sum x^2 y^2 / (|x| |y|)^2 is to
    be taken off 1 + cos^2.

    Args:
        proj_dim: k.
        kernel: Exact inner products, shape (n, n).
        peaks: From ``peakedness`` for rademacher, shape (n, n); None takes 0, which is exact for
            normal entries and close to it for gradients without dominant coordinates.

    Returns:
        Shape (n, n).

    Raises:
        InputError: If a gradient is zero.
    """
    squared = _squared_norms(kernel)
    cosine = kernel / np.sqrt(np.outer(squared, squared))
    return np.sqrt((1 + cosine**2 - 2 * (0 if peaks is None else peaks)) / proj_dim)


def _squared_norms(kernel: np.ndarray) -> np.ndarray:
    squared = np.diagonal(kernel)
    if not (squared > 0).all():
        raise InputError(
            "Relative errors need gradients that aren't zero. Found zero for the rows "
            f"{np.flatnonzero(~(squared > 0))[:8].tolist()}. Leave these samples out."
        )
    return squared


def _agreement(errors: Sequence[np.ndarray], predicted_sd: np.ndarray) -> Agreement:
    if not errors:
        raise InputError("Diagnostics need the features of at least one stream. Found none.")
    by_stream = np.array([np.sqrt(np.mean(error**2)) for error in errors])
    n = len(by_stream)
    spread = float(by_stream.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    predicted = float(np.sqrt(np.mean(predicted_sd**2)))
    return Agreement(float(by_stream.mean()), spread, predicted, n)

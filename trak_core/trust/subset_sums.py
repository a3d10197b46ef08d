"""Sums of scores over subsets, straight from features: n x m scores are never formed.

A sum over a subset is linear in the rows of Phi_c, so that with masks M (S, n), weights w of the
training samples and solved targets X_c (k, m) the sums are ((M * w) Phi_c) X_c: the first factor
is made once, and serves every way to solve for the targets.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from trak_core.scoring.solve import Spectrum, weighted_gramians

Blocks = Iterable[tuple[int, int, np.ndarray]]


def weighted_sums(
    masks: np.ndarray,
    weights: Sequence[np.ndarray],
    blocks: Blocks,
    squared: Sequence[np.ndarray] = (),
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sum the weighted features of each subset, and weighted products of all, in one pass.

    Args:
        masks: 1 where a subset has a sample, shape (S, n), float64.
        weights: Of the samples, each of shape (n,).
        blocks: Start, stop and features (rows, k) of every block of samples.
        squared: Weights of the products, each of shape (n,).

    Returns:
        Shape (len(weights), S, k), float64; and for each of ``squared`` what ``weighted_gramians``
        returns, nothing for none.
    """
    totals: list[np.ndarray] = []

    def summed() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        for start, stop, features in blocks:
            rows = features.astype(np.float64)
            part = np.stack([(masks[:, start:stop] * w[start:stop]) @ rows for w in weights])
            totals[:] = [np.add(totals[0], part, out=part) if totals else part]
            yield rows, [one[start:stop] for one in squared]

    gramians = weighted_gramians(summed())
    return totals[0], gramians


def damped_sums(
    sums: np.ndarray, spectrum: Spectrum, lambdas: Sequence[float], targets: np.ndarray
) -> np.ndarray:
    """Return sums of A_c's columns over subsets for every damping, by one eigendecomposition.

    With N = V D V^T they are (sums V) (D + lambda I)^-1 (T V)^T.

    Args:
        sums: From ``weighted_sums``, shape (W, S, k), or its first k columns.
        spectrum: Of N, shape (k, k), or of its first k rows and columns.
        lambdas: Not relative, above 0.
        targets: T, shape (m, k), float64.

    Returns:
        Shape (len(lambdas), W, S, m), float64.

    Source: spec of the scores, "The formula".
    """
    rotated, rotated_targets = sums @ spectrum.vectors, targets @ spectrum.vectors
    return np.stack([
        (rotated / (spectrum.eigenvalues + shift)) @ rotated_targets.T for shift in lambdas
    ])

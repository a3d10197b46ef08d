"""Sums of scores over subsets, straight from features: n x m scores are never formed.

A sum over a subset is linear in the rows of Phi_c, so that with masks M (S, n), weights w of the
training samples and solved targets X_c (k, m) the sums are ((M * w) Phi_c) X_c: the first factor
is made once, and serves every way to solve for the targets.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import scipy.linalg


def weighted_sums(
    masks: np.ndarray, weights: Sequence[np.ndarray], blocks: Iterable[tuple[int, int, np.ndarray]]
) -> np.ndarray:
    """Sum the weighted features of each subset.

    Args:
        masks: 1 where a subset has a sample, shape (S, n), float64.
        weights: Of the samples, each of shape (n,).
        blocks: Start, stop and features (rows, k) of every block of samples.

    Returns:
        Shape (len(weights), S, k), float64.
    """
    total: np.ndarray | None = None
    for start, stop, features in blocks:
        rows = features.astype(np.float64)
        part = np.stack([(masks[:, start:stop] * w[start:stop]) @ rows for w in weights])
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


def damped_sums(
    sums: np.ndarray,
    matrix: np.ndarray,
    n_train: int,
    targets: np.ndarray,
    dampings: Sequence[float],
) -> np.ndarray:
    """Return sums of A_c's columns over subsets for every damping, by one eigendecomposition.

    With N = V D V^T they are (sums V) (D + lambda I)^-1 (T V)^T, lambda = damping * trace(N) / n:
    the trace is the sum of the weighted squared norms.

    Args:
        sums: From ``weighted_sums``, shape (W, S, k), or its first k columns.
        matrix: N, shape (k, k), float64, or its first k rows and columns.
        n_train: n.
        targets: T, shape (m, k), float64.
        dampings: Relative, above 0.

    Returns:
        Shape (len(dampings), W, S, m), float64.

    Source: spec of the scores, "The formula".
    """
    eigenvalues, vectors = scipy.linalg.eigh(matrix)
    rotated, rotated_targets = sums @ vectors, targets @ vectors
    lambdas = [damping * np.trace(matrix) / n_train for damping in dampings]
    # Rounding leaves negative ones of a singular matrix.
    spread = np.maximum(eigenvalues, 0)
    return np.stack([(rotated / (spread + shift)) @ rotated_targets.T for shift in lambdas])

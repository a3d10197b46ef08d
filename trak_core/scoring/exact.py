"""Exact scores: TRAK's formula in its dual form, for Gramians of n x n; NumPy and SciPy only."""

import numpy as np
import scipy.linalg

from trak_core.errors import InputError
from trak_core.scoring.solve import MAX_CONDITION


def exact_similarities(
    gramian: np.ndarray, cross: np.ndarray, weights: np.ndarray, damping: float
) -> tuple[np.ndarray, float]:
    """Return A_c of the scores without a projection.

    Computes A = (K W + lambda I)^-1 K_t, which equals J (J^T W J + lambda I)^-1 J_t^T for
    gradients J and J_t with K = J J^T and K_t = J J_t^T, with lambda = damping * mean_i w_i K_ii.
    With S = W^(1/2) it is [K_t - K S (S K S + lambda I)^-1 S K_t] / lambda: symmetric, and defined
    where a weight is 0. Without damping it is W^-1 K^-1 K_t, for Gramians that have an inverse.

    Args:
        gramian: K, shape (n, n), float64, symmetric, positive semi-definite.
        cross: K_t, shape (n, m), float64.
        weights: The diagonal of W, shape (n,), not negative; ones for the plain normal matrix.
        damping: Relative, at least 0.

    Returns:
        A of shape (n, m), float64, and lambda.

    Raises:
        InputError: If the damped Gramian is numerically singular, or if weights are 0 without
            damping: an answer would be noise.

    Source: the identity of Woodbury; spec of the scores, "The formula".
    """
    if damping < 0:
        raise InputError(f"The damping must be at least 0. Found {damping}.")
    weights = weights.astype(np.float64)
    lambda_ = damping * float(np.mean(weights * np.diagonal(gramian)))
    root = np.sqrt(weights)
    damped = gramian * root[:, None] * root
    damped.flat[:: len(damped) + 1] += lambda_
    _check_condition(damped, lambda_)
    # Symmetric matrices are their own transposes: LAPACK works in place, in Fortran's order.
    factor = scipy.linalg.cho_factor(damped.T, lower=True, overwrite_a=True)
    solved = scipy.linalg.cho_solve(factor, root[:, None] * cross)
    if lambda_ == 0:
        return solved / root[:, None], lambda_
    return (cross - gramian @ (root[:, None] * solved)) / lambda_, lambda_


def _check_condition(damped: np.ndarray, lambda_: float) -> None:
    eigenvalues = scipy.linalg.eigvalsh(damped)
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if not smallest * MAX_CONDITION > largest:
        condition = f"{largest / smallest:.2g}" if smallest > 0 else "infinite"
        raise InputError(
            "The damped Gramian must be well-conditioned: its condition number has to stay below "
            f"{MAX_CONDITION:.0e}, since gradients have seven digits. Found {condition} "
            f"(eigenvalues {smallest:.3g} to {largest:.3g}, of which lambda = {lambda_:.3g}, "
            f"n = {len(damped)}). More samples than parameters, equal gradients, or weights of 0 "
            "always need damping. Raise `scoring.damping` (2 is a good value)."
        )

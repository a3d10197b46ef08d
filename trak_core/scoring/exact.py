"""Solve TRAK's formula in its dual form, for Gramians of n x n; NumPy and SciPy only."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.linalg

from trak_core.errors import InputError
from trak_core.scoring.solve import MAX_CONDITION, extreme_eigenvalues, positive_root

# Columns of the Gramian that are solved for at once.
_COLUMNS = 256


def divide_by_lengths(gramian: np.ndarray, cross: np.ndarray) -> None:
    """Make inner products those of training gradients of length 1, in place.

    A gradient of zeros stays zeros, and what rounding has left of one becomes zeros.

    Args:
        gramian: K = J J^T, shape (n, n), float64.
        cross: K_t = J J_t^T, shape (n, m), float64; the targets' gradients stay as they are.
    """
    squares = np.diagonal(gramian)
    there = squares > np.finfo(np.float32).eps ** 2 * squares.max()
    shares = (there / np.sqrt(np.where(there, squares, 1)))[:, None]
    gramian *= shares
    gramian *= shares.T
    cross *= shares


@dataclass(frozen=True, slots=True)
class DampedGramian:
    """S K S + ridge I of a Gramian K and S = W^(1/2), factorized.

    Attributes:
        gramian: K, shape (n, n), float64, symmetric, positive semi-definite.
        root: The diagonal of S, shape (n,), float64.
        ridge: damping * mean_i w_i K_ii, which is added to the diagonal.
        factor: Cholesky's, in the lower triangle, shape (n, n).

    Example:
        >>> import numpy as np
        >>> J, J_t = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[1.0, 1.0]])
        >>> damped = DampedGramian.factorize(J @ J.T, weights=np.ones(2), damping=2)
        >>> damped.similarities(J @ J_t.T).round(3)
        array([[0.167],
               [0.222]])
    """

    gramian: np.ndarray
    root: np.ndarray
    ridge: float
    factor: np.ndarray

    @classmethod
    def factorize(cls, gramian: np.ndarray, weights: np.ndarray, damping: float) -> Self:
        """Return the factorized matrix, which solves for any targets.

        K = J J^T has shape (n, n), float64. Weights, the diagonal of W, shape (n,), are not
        negative; ones stand for the plain normal matrix. The damping, at least 0, is relative to
        the mean squared length of the weighted gradients; 2 is a good value. A damped Gramian that
        is numerically singular is refused, as are weights of 0 without damping, because an answer
        would be noise.
        """
        if damping < 0:
            raise InputError(f"The damping must be at least 0. Found {damping}.")
        weights = weights.astype(np.float64)
        ridge = damping * float(np.mean(weights * np.diagonal(gramian)))
        root = np.sqrt(weights)
        damped = gramian * root[:, None] * root
        damped.flat[:: len(damped) + 1] += ridge
        _check_condition(damped, ridge)
        # Symmetric matrices are their own transposes: LAPACK works in place, in Fortran's order.
        factor = scipy.linalg.cho_factor(damped.T, lower=True, overwrite_a=True)[0]
        return cls(gramian, root, ridge, factor)

    def similarities(self, cross: np.ndarray) -> np.ndarray:
        """Return A_c of the scores without a projection.

        Computes A = (K W + ridge I)^-1 K_t, which equals J (J^T W J + ridge I)^-1 J_t^T for
        gradients J and J_t with K = J J^T and K_t = J J_t^T. With S = W^(1/2) it is
        [K_t - K S (S K S + ridge I)^-1 S K_t] / ridge: symmetric, and defined where a weight is
        0. Without damping it is W^-1 K^-1 K_t, for Gramians that have an inverse. Both K_t and the
        result have shape (n, m), float64.

        Source: Woodbury's identity; docs/explanation/scores.md, "Exact scores".
        """
        solved = scipy.linalg.cho_solve((self.factor, True), self.root[:, None] * cross)
        if self.ridge == 0:
            return solved / self.root[:, None]
        return (cross - self.gramian @ (self.root[:, None] * solved)) / self.ridge

    def train_norm(self, row_weights: np.ndarray) -> float:
        """Return N_c = ||diag(|Q|^power) J M^-1 J^T||_F, M = J^T W J + ridge I, without J.

        Row weights are |Q|^power, shape (n,), float64. N_c must be above 0.
        """
        squared = 0.0
        for start in range(0, len(self.gramian), _COLUMNS):
            rows = self.similarities(self.gramian[:, start : start + _COLUMNS])
            squared += float(np.sum((row_weights[:, None] * rows) ** 2))
        return positive_root(squared)


def _check_condition(damped: np.ndarray, ridge: float) -> None:
    smallest, largest = extreme_eigenvalues(damped)
    if not smallest * MAX_CONDITION > largest:
        condition = f"{largest / smallest:.2g}" if smallest > 0 else "infinite"
        raise InputError(
            "The damped Gramian must be well-conditioned: its condition number has to stay below "
            f"{MAX_CONDITION:.0e}, since gradients have seven digits. Found {condition} "
            f"(eigenvalues {smallest:.3g} to {largest:.3g}, of which the ridge = {ridge:.3g}, "
            f"n = {len(damped)}). More samples than parameters, equal gradients, or weights of 0 "
            "always need damping. Raise `scoring.damping` (2 is a good value).",
            code="scoring.singular_gramian",
        )

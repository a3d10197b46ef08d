"""Solve TRAK's formula, damped, from normal matrices or from Gramians of n x n; NumPy and SciPy."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.linalg
from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue] -- made at run time

from trak_core.errors import InputError

# Features are float32: below about the inverse of this condition number, directions of the normal
# matrix are rounding noise.
MAX_CONDITION = 1e7


def weighted_gramians(
    blocks: Iterable[tuple[np.ndarray, Sequence[np.ndarray]]],
) -> list[np.ndarray]:
    """Sum normal matrices sum_i w_i phi_i phi_i^T over blocks of rows, one for each way to weigh.

    Equivalent to ``phi.T @ np.diag(w) @ phi``, whose trace is sum_i w_i |phi_i|^2. How rows are cut
    into blocks changes the rounding of float64 sums alone. Blocks are features (rows, k), any float
    dtype, and any number of sets of weights (rows,), non-negative. There must be a row.

    Returns:
        A matrix for each set of weights, shape (k, k), float64, exactly symmetric.

    Source: docs/explanation/scores.md, "The formula".
    """
    totals: list[np.ndarray] = []
    n_rows = 0
    for features, weights in blocks:
        n_rows += len(features)
        for i, row_weights in enumerate(weights):
            # syrk computes one triangle, half the work; scipy's rows are Fortran's columns.
            rows = features * np.sqrt(row_weights, dtype=np.float64)[:, None]
            part = dsyrk(1.0, rows.T, lower=1)
            if i < len(totals):
                totals[i] += part
            else:
                totals.append(part)
    if not n_rows:
        words = "The normal matrix needs at least one training sample. Found none."
        raise InputError(words, code="scoring.no_rows")
    for total in totals:
        # dsyrk leaves zeros above; one other matrix is there at a time.
        diagonal = np.diagonal(total).copy()
        total += total.T
        total.flat[:: len(total) + 1] = diagonal
    return totals


def mean_squared_norm(normal_matrix: np.ndarray, n_rows: int) -> float:
    """Return mean_i w_i |phi_i|^2 of the rows that a normal matrix sums, from its trace."""
    return float(np.trace(normal_matrix)) / n_rows


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Eigenvalues D and eigenvectors V of a normal matrix V D V^T, for many dampings at once.

    D is ascending, not negative, of shape (k,); V's columns are of shape (k, k); both are float64.
    """

    eigenvalues: np.ndarray
    vectors: np.ndarray

    @classmethod
    def decompose(cls, matrix: np.ndarray) -> Self:
        """Decompose a symmetric, positive semi-definite matrix of shape (k, k), float64."""
        eigenvalues, vectors = scipy.linalg.eigh(matrix)
        # Rounding leaves negative ones of a singular matrix.
        return cls(np.maximum(eigenvalues, 0), vectors)

    def norm_products(self, weighted: np.ndarray, gramian: np.ndarray) -> np.ndarray:
        """Return what ||B|| of every damping comes from: (V^T Y^T Y V) * (V^T Phi^T Phi V).

        Y^T Y of the rows times |Q|^power, and Phi^T Phi, have shape (k, k), float64.
        """
        products = self.vectors.T @ (weighted @ self.vectors)
        products *= self.vectors.T @ (gramian @ self.vectors)
        return products


def train_norm(eigenvalues: np.ndarray, products: np.ndarray, ridge: float) -> float:
    """Return ||B|| = ||diag(|Q|^power) Phi M^-1 Phi^T||_F, M = Phi^T W Phi + ridge I.

    Its square is tr(M^-1 Y^T Y M^-1 Phi^T Phi) with Y = diag(|Q|^power) Phi, and where M's
    eigenvectors are the axes sum_ij products_ij / ((D_i + ridge) (D_j + ridge)). Eigenvalues D of
    Phi^T W Phi have shape (k,), float64; products are those of ``Spectrum.norm_products``. ||B||
    must be above 0, which loss weights or features that are all 0 don't allow.

    Source: docs/explanation/scores.md, "The formula".
    """
    shares = np.divide(1, eigenvalues + ridge, where=eigenvalues + ridge > 0, out=0 * eigenvalues)
    return positive_root(float(shares @ products @ shares))


def positive_root(squared: float) -> float:
    """Return the norm with this square, by which scores can be divided: it must be above 0."""
    if not squared > 0:
        raise InputError(
            "With `combine: unit_average` a checkpoint's scores are divided by their norm over the "
            f"training samples, which must be above 0. Found {squared:.3g}: the loss weights are "
            "all 0, or the gradients. Leave this checkpoint out, or set scoring.combine.",
            code="scoring.norm",
        )
    return squared**0.5


def extreme_eigenvalues(matrix: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest eigenvalue of a symmetric matrix, float64.

    Equivalent to the ends of ``np.linalg.eigvalsh(matrix)``.
    """
    eigenvalues = scipy.linalg.eigvalsh(matrix)
    return float(eigenvalues[0]), float(eigenvalues[-1])


def _condition(smallest: float, largest: float, ridge: float, size: str) -> str:
    """Return a condition number in words, and what it comes from."""
    condition = f"{largest / smallest:.2g}" if smallest > 0 else "infinite"
    ends = f"eigenvalues {smallest:.3g} to {largest:.3g}"
    return f"{condition} ({ends}, with ridge = {ridge:.3g}, {size})"


def damped_factor(matrix: np.ndarray, ridge: float, eigenvalues: tuple[float, float]) -> np.ndarray:
    """Return Cholesky's factor L with L L^T = matrix + ridge I.

    Equivalent to ``scipy.linalg.cho_factor(matrix + ridge * np.eye(k), lower=True)[0]``, which
    answers for nearly singular matrices too. Here they are refused, because an answer would be
    noise. The matrix is symmetric, positive semi-definite, shape (k, k), float64; the ridge at
    least 0; eigenvalues are the smallest and largest of the matrix.

    Returns:
        L in the lower triangle, shape (k, k), float64; what is above it doesn't count.
    """
    smallest, largest = (value + ridge for value in eigenvalues)
    if not smallest * MAX_CONDITION > largest:
        raise InputError(
            "The damped normal matrix must be well-conditioned: its condition number has to stay "
            f"below {MAX_CONDITION:.0e}, since features have seven digits. Found "
            f"{_condition(smallest, largest, ridge, f'k = {len(matrix)}')}. A proj_dim above the "
            "number of training samples always needs damping. Raise `scoring.damping` or "
            "lower `projection.proj_dim`.",
            code="scoring.singular",
        )
    damped = matrix.copy()
    damped.flat[:: len(matrix) + 1] += ridge
    # Transposed it is the same matrix, in Fortran's order: LAPACK works in place.
    return scipy.linalg.cho_factor(damped.T, lower=True, overwrite_a=True)[0]


def damped_solve(
    matrix: np.ndarray, ridge: float, eigenvalues: tuple[float, float], right_side: np.ndarray
) -> np.ndarray:
    """Return X of (matrix + ridge I) X = right_side by ``damped_factor``; all are float64.

    Equivalent to ``np.linalg.solve(matrix + ridge * np.eye(k), right_side)`` with a right side of
    shape (k, m). The ridge is the damping times the rows' mean squared length.

    Example:
        >>> import numpy as np
        >>> from trak_core.attribution.solve import (
        ...     extreme_eigenvalues, mean_squared_norm, weighted_gramians
        ... )
        >>> phi = np.array([[1.0, 0.0], [0.0, 2.0]])
        >>> (matrix,) = weighted_gramians([(phi, [np.ones(2)])])
        >>> ridge = 2 * mean_squared_norm(matrix, n_rows=2)
        >>> damped_solve(matrix, ridge, extreme_eigenvalues(matrix), phi.T)
        array([[0.16666667, 0.        ],
               [0.        , 0.22222222]])
    """
    factor = damped_factor(matrix, ridge, eigenvalues)
    return scipy.linalg.cho_solve((factor, True), right_side)


def damped_squares(factor: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return phi^T (matrix + ridge I)^-1 phi of every row, |L^-1 phi|^2, float64.

    ``factor`` is L from ``damped_factor``; the rows are of shape (rows, k), any float dtype.
    """
    solved = scipy.linalg.solve_triangular(factor, rows.astype(np.float64).T, lower=True)
    return np.einsum("ij,ij->j", solved, solved)


# Rows of float32 leave eigenvalues of about 1e-14 of the largest where there should be none.
_SINGULAR = 1e13


def inverse_or_pseudo_inverse(matrix: np.ndarray, max_rank: int) -> tuple[np.ndarray, int]:
    """Return the inverse of a matrix and its rank, or the pseudo-inverse where there is no inverse.

    The matrix is symmetric, positive semi-definite, (k, k), float64. A direction counts if its
    eigenvalue is above 1e-13 of the largest, and at most ``max_rank`` do. For G^T G, G times the
    pseudo-inverse is the limit of G inv(G^T G + lambda I) for lambda to 0.
    """
    k = len(matrix)
    if max_rank >= k:
        with contextlib.suppress(np.linalg.LinAlgError):
            inverse = np.linalg.inv(matrix)
            if np.linalg.norm(matrix) * np.linalg.norm(inverse) < _SINGULAR:
                return inverse, k
    spectrum = Spectrum.decompose(matrix)
    first = max(
        k - max_rank, int((spectrum.eigenvalues <= spectrum.eigenvalues[-1] / _SINGULAR).sum())
    )
    directions = spectrum.vectors[:, first:]
    return (directions / spectrum.eigenvalues[first:]) @ directions.T, k - first


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
        the mean squared length of the weighted gradients. A damped Gramian that is numerically
        singular is refused, as are weights of 0 without damping, because an answer would be noise.
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
        """Return ||B|| = ||diag(|Q|^power) J M^-1 J^T||_F, M = J^T W J + ridge I, without J.

        Row weights are |Q|^power, shape (n,), float64. ||B|| must be above 0.
        """
        squared = 0.0
        for start in range(0, len(self.gramian), _COLUMNS):
            rows = self.similarities(self.gramian[:, start : start + _COLUMNS])
            squared += float(np.sum((row_weights[:, None] * rows) ** 2))
        return positive_root(squared)


def _check_condition(damped: np.ndarray, ridge: float) -> None:
    smallest, largest = extreme_eigenvalues(damped)
    if not smallest * MAX_CONDITION > largest:
        raise InputError(
            "The damped Gramian must be well-conditioned: its condition number has to stay below "
            f"{MAX_CONDITION:.0e}, since gradients have seven digits. Found "
            f"{_condition(smallest, largest, ridge, f'n = {len(damped)}')}. More samples than "
            "parameters, equal gradients, or weights of 0 always need damping. Raise "
            "`scoring.damping`.",
            code="scoring.singular_gramian",
        )

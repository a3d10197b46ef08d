"""Solve damped linear systems with a k x k normal matrix or an n x n Gramian."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.linalg
from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue] -- made at run time

from trak_core.errors import InputError

# Features are float32, so directions with eigenvalues below about 1e-7 times the largest are noise.
MAX_CONDITION = 1e7
# If the condition number is below this bound, rounding cannot make the damped matrix indefinite.
_SAFE_CONDITION = MAX_CONDITION / 100


def weighted_gramians(
    blocks: Iterable[tuple[np.ndarray, Sequence[np.ndarray]]],
) -> list[np.ndarray]:
    """Compute normal matrices Phi^T W Phi = sum_i w_i phi_i phi_i^T from blocks of rows.

    Equivalent to ``phi.T @ np.diag(w) @ phi`` for each set of weights w, in one pass over the rows.
    A block consists of features, shape (rows, k), of any float dtype, and of sets of non-negative
    weights, shape (rows,) each. The sizes of the blocks change only the rounding.

    Returns:
        A matrix for each set of weights, shape (k, k), float64, exactly symmetric. Its trace is
        sum_i w_i |phi_i|^2.
    """
    totals: list[np.ndarray] = []
    for features, weights in blocks:
        for i, row_weights in enumerate(weights):
            # syrk computes one triangle, which is half the work of a product. BLAS needs
            # column-major arrays, and the transpose of a row-major array is column-major.
            rows = features * np.sqrt(row_weights, dtype=np.float64)[:, None]
            part = dsyrk(1.0, rows.T, lower=1)
            if i < len(totals):
                totals[i] += part
            else:
                totals.append(part)
    for total in totals:
        fill_upper(total)
    return totals


def fill_upper(lower: np.ndarray) -> None:
    """Copy a matrix's lower triangle in place to its upper triangle, which must be zero."""
    diagonal = np.diagonal(lower).copy()
    lower += lower.T  # In place, this needs only one copy of the matrix. It doubles the diagonal.
    lower.flat[:: len(lower) + 1] = diagonal


def mean_squared_norm(normal_matrix: np.ndarray, n_rows: int) -> float:
    """Return the mean of w_i |phi_i|^2 over samples i from N = sum_i w_i phi_i phi_i^T."""
    return float(np.trace(normal_matrix)) / n_rows


@dataclass(frozen=True, slots=True)
class DampedMatrix:
    """The Cholesky factorization L L^T = M + ridge I of a normal matrix or weighted Gramian M.

    Attributes:
        factor: L in the lower triangle, shape (k, k), float64. The upper triangle is not used.
        ridge: The number that was added to the diagonal.
    """

    factor: np.ndarray
    ridge: float

    @classmethod
    def factorize(
        cls, matrix: np.ndarray, ridge: float, eigenvalues: tuple[float, float] | None = None
    ) -> Self:
        """Return the factorization of M + ridge I, with a ridge of at least 0.

        Unlike ``scipy.linalg.cho_factor(M + ridge * np.eye(k), lower=True)``, this method raises an
        error if the condition number is ``MAX_CONDITION`` or more, because solutions would be
        noise.

        M is symmetric and positive semi-definite, shape (k, k), float64. ``eigenvalues`` are the
        smallest and the largest eigenvalue of M. If they are None, they are computed if needed.
        """
        # Computing eigenvalues takes longer than the factorization. They are not needed if the
        # trace, an upper bound of the largest eigenvalue, shows that the condition number is small.
        ends = eigenvalues or (0.0, float(np.trace(matrix)))
        if eigenvalues is None and ends[1] > _SAFE_CONDITION * ridge:
            ends = scipy.linalg.eigvalsh(matrix)[[0, -1]].tolist()
        smallest, largest = (value + ridge for value in ends)
        if not smallest * MAX_CONDITION > largest:
            condition = f"{largest / smallest:.2g}" if smallest > 0 else "infinite"
            raise InputError(
                f"The condition number of the damped matrix must be below {MAX_CONDITION:.0e}. "
                f"Found {condition} (eigenvalues {smallest:.3g} to {largest:.3g}, with ridge = "
                f"{ridge:.3g}, {len(matrix)} rows). Raise `scoring.damping`. It must be above 0 if "
                "gradients are equal, or if proj_dim exceeds the number of training samples. "
                "Without a projection, it must be above 0 if there are more training samples than "
                "parameters.",
                code="scoring.singular",
            )
        damped = matrix.copy()
        damped.flat[:: len(matrix) + 1] += ridge
        # The transpose is the same matrix in column-major order, which LAPACK factorizes in place.
        return cls(scipy.linalg.cho_factor(damped.T, lower=True, overwrite_a=True)[0], ridge)

    def solve(self, right_side: np.ndarray) -> np.ndarray:
        """Return the solution X of (M + ridge I) X = ``right_side``, shape (k, m), float64."""
        return scipy.linalg.cho_solve((self.factor, True), right_side)

    def squares(self, rows: np.ndarray) -> np.ndarray:
        """Return phi^T (M + ridge I)^-1 phi = |L^-1 phi|^2 for each row phi (k,), float64."""
        solved = scipy.linalg.solve_triangular(self.factor, rows.astype(np.float64).T, lower=True)
        return np.einsum("ij,ij->j", solved, solved)


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The eigendecomposition V D V^T of a normal matrix. It can be used for any damping.

    Attributes:
        eigenvalues: D, ascending and non-negative, shape (k,), float64.
        vectors: V, an eigenvector in each column, shape (k, k), float64.
    """

    eigenvalues: np.ndarray
    vectors: np.ndarray

    @classmethod
    def decompose(cls, matrix: np.ndarray) -> Self:
        """Return the spectrum of a symmetric, positive semi-definite matrix (k, k), float64."""
        eigenvalues, vectors = scipy.linalg.eigh(matrix)
        # Rounding makes some eigenvalues of a singular matrix negative.
        return cls(np.maximum(eigenvalues, 0), vectors)

    def norm_products(self, weighted: np.ndarray, gramian: np.ndarray) -> np.ndarray:
        """Return P = (V^T Y^T Y V) * (V^T Phi^T Phi V), which is an argument of ``train_norm``.

        ``weighted`` is Y^T Y, where Y = diag(|Q|^power) Phi, Phi are the features, and Q are the
        loss weights. ``gramian`` is Phi^T Phi. All matrices have shape (k, k), float64. The product
        * is entrywise.
        """
        products = self.vectors.T @ (weighted @ self.vectors)
        products *= self.vectors.T @ (gramian @ self.vectors)
        return products


def train_norm(eigenvalues: np.ndarray, products: np.ndarray, ridge: float) -> float:
    """Return the norm ||B||_F of the training samples' scores B for each other.

    B = diag(|Q|^power) Phi M^-1 Phi^T, with features Phi, loss weights Q and M = Phi^T W Phi +
    ridge I. Then ||B||^2 = tr(M^-1 Y^T Y M^-1 Phi^T Phi) with Y = diag(|Q|^power) Phi. In the basis
    of M's eigenvectors, ||B||^2 = sum_ij P_ij / ((D_i + ridge) (D_j + ridge)), where D are the
    eigenvalues of Phi^T W Phi, shape (k,), and P are the products of ``Spectrum.norm_products``.
    """
    inverse = np.divide(1, eigenvalues + ridge, where=eigenvalues + ridge > 0, out=0 * eigenvalues)
    return _positive_root(float(inverse @ products @ inverse))


def _positive_root(squared_norm: float) -> float:
    """Return a norm from its square. A norm of 0 is an error, because scores are divided by it."""
    if not squared_norm > 0:
        raise InputError(
            "With `combine: unit_average`, the norm of a checkpoint's scores of training samples "
            f"for each other must be above 0. Found {squared_norm:.3g}, because all loss weights "
            "or all gradients are 0. Remove this checkpoint, or choose another scoring.combine.",
            code="scoring.norm",
        )
    return squared_norm**0.5


# A matrix with this condition number counts as singular, because features are rounded to float32,
# so that eigenvalues of 0 become about 1e-14 times the largest one.
_SINGULAR = 1e13


def inverse_or_pseudo_inverse(matrix: np.ndarray, max_rank: int) -> tuple[np.ndarray, int]:
    """Return the inverse of a matrix, or the pseudo-inverse if it is nearly singular, and the rank.

    The pseudo-inverse uses at most ``max_rank`` eigenvectors, with eigenvalues above 1e-13 times
    the largest. The matrix is symmetric, positive semi-definite, of shape (k, k), float64.
    """
    k = len(matrix)
    if max_rank >= k:
        with contextlib.suppress(np.linalg.LinAlgError):
            inverse = np.linalg.inv(matrix)
            if np.linalg.norm(matrix) * np.linalg.norm(inverse) < _SINGULAR:
                return inverse, k
    spectrum = Spectrum.decompose(matrix)
    n_small = int((spectrum.eigenvalues <= spectrum.eigenvalues[-1] / _SINGULAR).sum())
    first = max(k - max_rank, n_small)
    directions = spectrum.vectors[:, first:]
    return (directions / spectrum.eigenvalues[first:]) @ directions.T, k - first


def inverse_lengths(gramian: np.ndarray) -> np.ndarray:
    """Return 1 / |g_i|, shape (n, 1), from the inner products of gradients g_i, shape (n, n).

    The result is 0 where a squared length is 0 or below the rounding error of the largest one.
    """
    squares = np.diagonal(gramian)
    is_nonzero = squares > np.finfo(np.float32).eps ** 2 * squares.max()
    return (is_nonzero / np.sqrt(np.where(is_nonzero, squares, 1)))[:, None]


# The solver is called for this many columns of the Gramian at a time, to limit memory.
_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class DampedGramian:
    """The factorized n x n matrix S K S + ridge I, from which exact scores are computed.

    Attributes:
        gramian: K = J J^T, where the rows of J are the training gradients, shape (n, n), float64.
        root: The square roots of the samples' weights, which are the diagonal of S, shape (n,),
            float64.
        damped: The factorization of S K S + ridge I.

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
    damped: DampedMatrix

    @property
    def ridge(self) -> float:
        """The number that was added to the diagonal of the weighted Gramian."""
        return self.damped.ridge

    @classmethod
    def factorize(cls, gramian: np.ndarray, weights: np.ndarray, damping: float) -> Self:
        """Return the factorized damped Gramian, which can be used for any targets.

        ``gramian`` is K = J J^T, shape (n, n), float64. ``weights`` are the diagonal of W, shape
        (n,), and must not be negative. The ridge is the damping, which must be at least 0, times
        mean_i w_i K_ii. If the damped matrix is numerically singular, an error is raised.
        """
        if damping < 0:
            raise InputError(
                f"The damping must be at least 0. Found {damping}.", code="attribution.scoring"
            )
        weights = weights.astype(np.float64)
        ridge = damping * float(np.mean(weights * np.diagonal(gramian)))
        root = np.sqrt(weights)
        weighted = gramian * root[:, None] * root
        return cls(gramian, root, DampedMatrix.factorize(weighted, ridge))

    def similarities(self, cross: np.ndarray) -> np.ndarray:
        """Return A = J (J^T W J + ridge I)^-1 J_t^T from ``cross`` = K_t = J J_t^T, without J.

        The rows of J and J_t are gradients of training samples and targets. By Woodbury's identity,
        A = (K W + ridge I)^-1 K_t = [K_t - K S (S K S + ridge I)^-1 S K_t] / ridge. The last form
        solves a symmetric system and is also defined if a weight is 0. Without damping,
        A = W^-1 K^-1 K_t if K has an inverse. K_t and A have shape (n, m), float64.
        """
        solved = self.damped.solve(self.root[:, None] * cross)
        if self.ridge == 0:
            return solved / self.root[:, None]
        return (cross - self.gramian @ (self.root[:, None] * solved)) / self.ridge

    def train_norm(self, row_weights: np.ndarray) -> float:
        """Return the norm ||B||_F of the training samples' scores B for each other.

        B = diag(``row_weights``) J M^-1 J^T, with training gradients J and M = J^T W J + ridge I.
        ``row_weights`` are powers of loss weights, |Q|^power, shape (n,), float64. The norm must be
        above 0.
        """
        squared = 0.0
        # B = diag(|Q|^power) A, where A is the result of ``similarities`` for training samples.
        n = len(row_weights)  # The rows after the first n belong to drawn labels.
        for start in range(0, n, _COLUMNS):
            columns = slice(start, min(start + _COLUMNS, n))
            rows = self.similarities(self.gramian[:, columns])[:n]
            squared += float(np.sum((row_weights[:, None] * rows) ** 2))
        return _positive_root(squared)

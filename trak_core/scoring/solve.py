"""The normal matrix and the damped solve; NumPy and SciPy only, all sums in float64."""

from collections.abc import Iterable

import numpy as np
import scipy.linalg
from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue] -- made at run time

from trak_core.errors import InputError

# Features are float32: below about the inverse of this condition number, directions of the normal
# matrix are rounding noise.
MAX_CONDITION = 1e7


def normal_matrix(blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, float, int]:
    """Sum the weighted normal matrix over blocks of rows.

    Computes N = sum_i w_i phi_i phi_i^T and mean_i w_i |phi_i|^2. The result depends on how rows
    are cut into blocks only by the rounding of float64 sums.

    Args:
        blocks: Features (rows, k), any float dtype, and weights (rows,), non-negative.

    Returns:
        N of shape (k, k), float64, exactly symmetric; the mean squared norm; the number of rows.

    Source: spec of the scores, "The formula".
    """
    total: np.ndarray | None = None
    squared, n_rows = 0.0, 0
    for features, weights in blocks:
        rows = features.astype(np.float64)
        rows *= np.sqrt(weights.astype(np.float64))[:, None]
        # syrk computes one triangle, half the work; scipy's rows are Fortran's columns.
        part = dsyrk(1.0, rows.T, lower=1)
        total = part if total is None else np.add(total, part, out=total)
        squared += float(np.einsum("ij,ij->", rows, rows))
        n_rows += len(rows)
    if total is None or n_rows == 0:
        raise InputError("The normal matrix needs at least one training sample. Found none.")
    # In place: at most two matrices are there at a time.
    total = np.tril(total)
    total += np.tril(total, -1).T
    return total, squared / n_rows, n_rows


def extreme_eigenvalues(matrix: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest eigenvalue of a symmetric matrix, float64."""
    eigenvalues = scipy.linalg.eigvalsh(matrix)
    return float(eigenvalues[0]), float(eigenvalues[-1])


def damped_factor(matrix: np.ndarray, shift: float, eigenvalues: tuple[float, float]) -> np.ndarray:
    """Return Cholesky's factor L with L L^T = matrix + shift I.

    Args:
        matrix: Symmetric, positive semi-definite, shape (k, k), float64.
        shift: lambda, not relative; at least 0.
        eigenvalues: Smallest and largest of ``matrix``.

    Returns:
        L in the lower triangle, shape (k, k), float64; what is above it doesn't count.

    Raises:
        InputError: If the damped matrix is numerically singular: an answer would be noise.
    """
    smallest, largest = (value + shift for value in eigenvalues)
    if not smallest * MAX_CONDITION > largest:
        condition = f"{largest / smallest:.2g}" if smallest > 0 else "infinite"
        raise InputError(
            "The damped normal matrix must be well-conditioned: its condition number has to stay "
            f"below {MAX_CONDITION:.0e}, since features have seven digits. Found {condition} "
            f"(eigenvalues {smallest:.3g} to {largest:.3g}, of which lambda = {shift:.3g}, "
            f"k = {len(matrix)}). A proj_dim above the number of training samples always needs "
            "damping. Raise `scoring.damping` (2 is a good value) or lower `projection.proj_dim`."
        )
    damped = matrix.copy()
    damped.flat[:: len(matrix) + 1] += shift
    # Transposed it is the same matrix, in Fortran's order: LAPACK works in place.
    return scipy.linalg.cho_factor(damped.T, lower=True, overwrite_a=True)[0]


def damped_solve(
    matrix: np.ndarray, shift: float, eigenvalues: tuple[float, float], right_side: np.ndarray
) -> np.ndarray:
    """Solve (matrix + shift I) X = right_side by Cholesky's method.

    Args:
        matrix: See ``damped_factor``.
        shift: Likewise.
        eigenvalues: Likewise.
        right_side: Shape (k, m), float64.

    Returns:
        X of shape (k, m), float64.

    Raises:
        InputError: If the damped matrix is numerically singular.
    """
    factor = damped_factor(matrix, shift, eigenvalues)
    return scipy.linalg.cho_solve((factor, True), right_side)


def damped_squares(factor: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return phi^T (matrix + shift I)^-1 phi of every row: |L^-1 phi|^2.

    Args:
        factor: From ``damped_factor``, shape (k, k).
        rows: Shape (rows, k), any float dtype.

    Returns:
        Shape (rows,), float64.
    """
    solved = scipy.linalg.solve_triangular(factor, rows.astype(np.float64).T, lower=True)
    return np.einsum("ij,ij->j", solved, solved)

"""How far a tensor sketch keeps norms and inner products, beside what theory says; NumPy only.

Its rows have one entry, +-1, so that errors come from pairs of coordinates that share a column. A
parameter's coordinates (i, j) and (k, l) share one if bucket0[i] - bucket0[k] = bucket1[l] -
bucket1[j]. Buckets are different within a run of proj_dim indices: then coordinates of one row, or
of one column, never meet, and others do once in proj_dim - 1. Indices of different runs (sides
longer than proj_dim) share a bucket once in proj_dim, and then whole rows or columns meet, with one
sign for all of their entries: what that adds is the square of a sum, not a sum of squares. It is at
most 4 ||G^T G||^2 / (k ||G||^4) of a squared norm for each parameter and side.
"""

from collections.abc import Iterator, Sequence

import numpy as np

# Numbers in work at a time, in float64: 32 MiB.
_PIECE = 2**22


def sketch_peakedness(
    x: np.ndarray, y: np.ndarray, shapes: Sequence[Sequence[int]], proj_dim: int
) -> np.ndarray:
    """Return what ``inner_product_sd`` takes off for all pairs of gradients, in its units.

    With S = |x|^2 |y|^2 + <x, y>^2 it is (S - k Var <Rx, Ry>) / 2 (|x| |y|)^2: below 0 where a
    tensor sketch errs more than a dense matrix. For different gradients whose sides are longer than
    proj_dim, the variance is an upper bound; all else is exact, but for terms of 1/k of it.

    Args:
        x: Gradients, shape (n, p), none zero.
        y: Gradients, shape (m, p), none zero.
        shapes: Of the parameters as matrices.
        proj_dim: k.

    Returns:
        Shape (n, m), float64.
    """
    exact = np.zeros((len(x), len(y)))
    x_norms, y_norms = np.zeros(len(x)), np.zeros(len(y))
    first = 0
    for n0, n1 in shapes:
        own = slice(first, first + n0 * n1)
        first += n0 * n1
        a, b = (rows[:, own].reshape(-1, n0, n1) for rows in (x, y))
        alone, inner, norms = _over_entries(a, b)
        pairs = np.outer(*norms) + inner**2 - 2 * alone
        in_line = _of_lines(a, b) + _of_lines(_turned(a), _turned(b)) - 4 * alone
        often = proj_dim / (proj_dim - 1) if max(n0, n1) <= proj_dim and proj_dim > 1 else 1.0
        exact += 2 * alone + pairs - often * (pairs - in_line)
        for c, d in ((a, b), (_turned(a), _turned(b))):
            if c.shape[2] > proj_dim:
                exact -= _met(c, d, proj_dim)
        x_norms += norms[0]
        y_norms += norms[1]
    return exact / (2 * np.outer(x_norms, y_norms))


def _turned(rows: np.ndarray) -> np.ndarray:
    return rows.transpose(0, 2, 1)


def _pieces(n_lines: int, each: int) -> Iterator[slice]:
    step = max(1, _PIECE // max(1, each))
    return (slice(i, i + step) for i in range(0, n_lines, step))


def _over_entries(
    a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return sum x_p^2 y_p^2 and <x, y> for all pairs, and the squared norms."""
    alone, inner = np.zeros((len(a), len(b))), np.zeros((len(a), len(b)))
    for part in _pieces(a.shape[1], (len(a) + len(b)) * a.shape[2]):
        c, d = (rows[:, part].reshape(len(rows), -1).astype(np.float64) for rows in (a, b))
        alone += c**2 @ (d**2).T
        inner += c @ d.T
    of_a, of_b = (np.einsum("nij,nij->n", rows, rows, dtype=np.float64) for rows in (a, b))
    return alone, inner, (of_a, of_b)


def _of_lines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return sum_i |x_i|^2 |y_i|^2 + <x_i, y_i>^2 over rows i, for all pairs."""
    total = np.zeros((len(a), len(b)))
    for part in _pieces(a.shape[1], max(len(a) * len(b), (len(a) + len(b)) * a.shape[2])):
        c, d = (rows[:, part].astype(np.float64) for rows in (a, b))
        total += (c**2).sum(2) @ (d**2).sum(2).T
        total += ((c.transpose(1, 0, 2) @ d.transpose(1, 2, 0)) ** 2).sum(0)
    return total


def _met(a: np.ndarray, b: np.ndarray, proj_dim: int) -> np.ndarray:
    """Return sum_{j < l in different runs} (M_jl + M_lj)^2, M = x^T y, for all pairs, or a bound.

    ||M||^2 is the inner product of x x^T and y y^T, and tr(M^2) at most that.
    """
    runs = [slice(i, i + proj_dim) for i in range(0, a.shape[2], proj_dim)]
    total = np.zeros((len(a), len(b)))
    for run, sign in ((slice(None), 1.0), *((run, -1.0) for run in runs)):
        c, d = a[:, :, run], b[:, :, run]
        if c.shape[1] <= c.shape[2]:
            total += sign * _squares(c) @ _squares(d).T
        else:  # the same, pair by pair, where x x^T would be the larger
            for i, one in enumerate(c.astype(np.float64)):
                total[i] += sign * ((one.T @ d) ** 2).sum((1, 2))
    return 2 * total


def _squares(rows: np.ndarray) -> np.ndarray:
    """Return x x^T of each sample, flattened."""
    return np.stack([(one @ one.T).ravel() for one in (row.astype(np.float64) for row in rows)])

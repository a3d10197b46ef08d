"""Predict how far a projection keeps norms and inner products, and measure it; NumPy only.

Every kind of projection is unbiased. Most keep some of the coordinates exactly where they are
alone: a single one (``rademacher``: its entries square to one number), or each block of
proj_dim consecutive ones (``hadamard``: orthogonal within a block). Errors come from pairs of
different blocks b, and over the choice of the matrix

    Var <Rx, Ry> = (|x|^2 |y|^2 + <x, y>^2 - sum_b (|x_b|^2 |y_b|^2 + <x_b, y_b>^2)) / k,

where ``normal`` has nothing to take off. Source: Achlioptas, JCSS 2003, for ``rademacher``; the
same sum over pairs for ``hadamard``, with the blocks' own signs.

A row of ``tensor_sketch`` has one entry, +-1, so that errors come from pairs of coordinates that
share a column. A parameter's coordinates (i, j) and (k, l) share one if bucket0[i] - bucket0[k] =
bucket1[l] - bucket1[j]. Buckets are different within a run of proj_dim indices. Then coordinates of
one row, or of one column, never meet, and others do once in proj_dim - 1. Indices of different runs
(sides longer than proj_dim) share a bucket once in proj_dim, and then whole rows or columns meet,
with one sign for all of their entries, which adds the square of a sum and not a sum of squares. It
is at most 4 ||G^T G||^2 / (k ||G||^4) of a squared norm for each parameter and side.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np

from trak_core.spec import ProjectionSpec

# Numbers in work at a time, in float64: 8 MiB.
_PIECE = 2**20


def product_variances(x: np.ndarray, y: np.ndarray, projection: ProjectionSpec) -> np.ndarray:
    """Return Var <Rx, Ry> over the choice of R for all pairs of gradients.

    For different gradients whose matrices have sides longer than proj_dim, a ``tensor_sketch`` gets
    an upper bound. Gradients have shape (n, p) and (m, p), any float dtype; variances (n, m),
    float64. They are 0 where the projection makes no error. Its seed and stream don't count.
    """
    k, block = projection.proj_dim, projection.lossless_block
    inner, squares = inner_products(x, y), np.outer(_squared_norms(x), _squared_norms(y))
    total = squares + inner**2
    if projection.shapes is not None:
        total = _sketch_variances(x, y, projection.shapes, k, total)
    elif block is not None:
        total -= _within_blocks(x, y, block)
    # Rounding may fall below the 0 of gradients within one block.
    return np.maximum(total, 0) / k


def inner_products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return <x, y> for all pairs of rows, float64. Equivalent to ``x @ y.T`` in float64."""
    total = np.zeros((len(x), len(y)))
    for part in _pieces(x.shape[1], len(x) + len(y)):
        total += x[:, part].astype(np.float64) @ y[:, part].astype(np.float64).T
    return total


def agreement(
    gramian: np.ndarray, variances: np.ndarray, streams: Sequence[np.ndarray]
) -> dict[str, tuple[float, float, float]]:
    """Compare squared norms and inner products of projected gradients with the exact ones.

    Errors are relative to |x|^2 and |x| |y|, and root mean squares over all samples, or over all
    pairs of different samples. Samples share one matrix, so that their errors go together: the
    standard error runs over matrices of independent streams.

    The Gramian has exact inner products, shape (n, n); variances are those of
    ``product_variances``; streams are scaled features of these samples, shape (n, k) each. No
    gradient may be zero, and there must be two samples and one stream.

    Returns:
        For ``squared_norm`` and ``inner_product`` the measured error, whose square is an unbiased
        estimate of the predicted error's square; its standard error, NaN for one stream; and what
        theory predicts.
    """
    squared = np.diagonal(gramian)
    scale = np.sqrt(np.outer(squared, squared))
    predicted = variances / scale**2
    places = {
        "squared_norm": np.diag_indices(len(gramian)),
        "inner_product": np.triu_indices(len(gramian), 1),
    }
    squares = []
    for rows in streams:
        errors = (inner_products(rows, rows) - gramian) / scale
        squares.append([np.mean(errors[pairs] ** 2) for pairs in places.values()])
    return {
        key: (*_root(np.array(of_streams)), sqrt(predicted[pairs].mean()))
        for (key, pairs), of_streams in zip(places.items(), zip(*squares, strict=True), strict=True)
    }


def _root(squares: np.ndarray) -> tuple[float, float]:
    """Return the root of the mean, and its standard error; NaN for a single number."""
    n, root = len(squares), sqrt(squares.mean())
    if n == 1 or root == 0:  # without any error there is no spread
        return root, np.nan if n == 1 else 0.0
    # Half the relative error of the square.
    return root, float(squares.std(ddof=1) / sqrt(n)) / (2 * root)


def _squared_norms(rows: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64)


def _pieces(n: int, each: int) -> Iterator[slice]:
    """Cut n columns or blocks of ``each`` numbers into pieces of bounded size."""
    step = max(1, _PIECE // max(1, each))
    return (slice(i, i + step) for i in range(0, n, step))


def _within_blocks(x: np.ndarray, y: np.ndarray, block: int) -> np.ndarray:
    """Return sum_b |x_b|^2 |y_b|^2 + <x_b, y_b>^2 for all pairs; the last block may be shorter."""
    whole = x.shape[1] // block * block
    total = np.zeros((len(x), len(y)))
    if whole < x.shape[1]:
        total += _within_rows(x[:, None, whole:], y[:, None, whole:])
    a, b = (rows[:, :whole].reshape(len(rows), whole // block, block) for rows in (x, y))
    return total + _within_rows(a, b)


def _within_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the same sum where blocks are rows of matrices, shape (n, rows, columns)."""
    total = np.zeros((len(a), len(b)))
    width = (len(a) + len(b)) * a.shape[2]
    for part in _pieces(a.shape[1], width if a.shape[2] == 1 else max(len(a) * len(b), width)):
        c, d = (rows[:, part].astype(np.float64) for rows in (a, b))
        total += (c**2).sum(2) @ (d**2).sum(2).T * (2 if a.shape[2] == 1 else 1)
        if a.shape[2] > 1:
            total += ((c.transpose(1, 0, 2) @ d.transpose(1, 2, 0)) ** 2).sum(0)
    return total


def _sketch_variances(
    x: np.ndarray, y: np.ndarray, shapes: Sequence[Sequence[int]], k: int, total: np.ndarray
) -> np.ndarray:
    """Return k Var <Rx, Ry> of a tensor sketch; ``total`` is |x|^2 |y|^2 + <x, y>^2."""
    total = total.copy()
    first = 0
    for n0, n1 in shapes:
        own = slice(first, first + n0 * n1)
        first += n0 * n1
        x_own, y_own = x[:, own], y[:, own]
        a, b = (rows.reshape(-1, n0, n1) for rows in (x_own, y_own))
        sides = [(a, b), (a.transpose(0, 2, 1), b.transpose(0, 2, 1))]
        alone = _within_blocks(x_own, y_own, 1)
        pairs = np.outer(_squared_norms(x_own), _squared_norms(y_own))
        pairs += inner_products(x_own, y_own) ** 2 - alone
        in_line = sum(_within_rows(*side) for side in sides) - 2 * alone
        often = k / (k - 1) if max(n0, n1) <= k and k > 1 else 1.0
        total += often * (pairs - in_line) - pairs - alone
        total += sum(_met(*side, k) for side in sides if side[0].shape[2] > k)
    return total


def _met(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """Return sum_{j < l in different runs} (M_jl + M_lj)^2, M = x^T y, for all pairs, or a bound.

    ||M||^2 is the inner product of x x^T and y y^T, and tr(M^2) at most that.
    """
    runs = [slice(i, i + k) for i in range(0, a.shape[2], k)]
    total = np.zeros((len(a), len(b)))
    for run, sign in ((slice(None), 2.0), *((run, -2.0) for run in runs)):
        c, d = a[:, :, run], b[:, :, run]
        if c.shape[1] <= c.shape[2]:
            total += sign * inner_products(_squares(c), _squares(d))
        else:  # the same, sample by sample, where x x^T would be the larger
            for i, row in enumerate(c.astype(np.float64)):
                total[i] += sign * ((row.T @ d) ** 2).sum((1, 2))
    return total


def _squares(rows: np.ndarray) -> np.ndarray:
    """Return x x^T of each sample, flattened."""
    return np.stack([(x @ x.T).ravel() for x in (row.astype(np.float64) for row in rows)])

"""Compute block-Hadamard projections and tensor sketches on a CPU.

With k columns, the fast Walsh-Hadamard transform needs log2(k) additions for each coordinate, where
a product with a dense projection matrix needs k. The log2(k) steps of the transform are computed in
registers, three at a time. A tensor sketch needs only one addition for each coordinate.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit

from trak_core.projection.cpu.simd_lanes import (
    INT64,
    LANES,
    compiled,
    fill_from_lanes,
    fill_lanes,
    fill_words,
    flush,
    key_of,
    spread,
    tiles_of,
    vector_intrinsic,
)
from trak_core.settings import ProjectionKind, ProjectionSpec

_HADAMARD = ProjectionKind.HADAMARD.tag
_FLUSH_BLOCKS = 32  # blocks after which the sums are added to the total
# The number c0 of the first Philox call for the column signs E_b of a block. The calls for the row
# signs D_b start at 0 (``reference.py``).
COLUMN_SIGNS = 2**31


def _butterfly(radix):
    """Return an intrinsic that applies Hadamard transforms of length ``radix`` in place.

    Each row of ``x`` contains one number for each of eight samples. The intrinsic transforms each
    sample's numbers in the ``radix`` rows first, first + step, first + 2 step, ....
    """

    @vector_intrinsic
    def butterfly(builder, x, first, step):
        positions = [builder.add(first, builder.mul(step, INT64(i))) for i in range(radix)]
        rows = [x.load(position) for position in positions]
        half = 1
        while half < radix:
            for i in range(radix):
                if not i & half:
                    low, high = rows[i], rows[i | half]
                    rows[i], rows[i | half] = builder.fadd(low, high), builder.fsub(low, high)
            half *= 2
        for row, position in zip(rows, positions, strict=True):
            x.store(row, position)

    return butterfly


_butterfly_2, _butterfly_8 = _butterfly(2), _butterfly(8)


@vector_intrinsic
def _multiply(builder, x, row, sign):
    """Multiply all eight numbers in a row of ``x`` by ``sign``."""
    x.store(builder.fmul(x.load(row), spread(builder, sign)), row)


@vector_intrinsic
def _add_signed(builder, sums, column, x, row, sign):
    """Add ``sign`` times a row of ``x`` to the sums of ``column``, separately for 8 samples."""
    product = builder.fmul(x.load(row), spread(builder, sign))
    sums.store(builder.fadd(sums.load(column), product), column)


@compiled
def fill_signs(signs, words, first_call, block, key):
    """Fill ``signs`` with the signs of a block's rows or columns, +1 or -1.

    ``first_call`` is 0 for the rows, and ``COLUMN_SIGNS`` for the columns.
    """
    fill_words(words, first_call, block, _HADAMARD, key)
    for i in range(len(signs)):
        bit = (words[i >> 5] >> np.uint32(i & 31)) & np.uint32(1)
        signs[i] = np.float32(1.0) - np.float32(2.0) * np.float32(bit)


@compiled
def _transform(x, n):
    """Replace each sample's numbers in the first n rows of ``x`` by their Hadamard transform."""
    step = 1
    while step * 8 <= n:
        for group in range(0, n, 8 * step):
            for i in range(group, group + step):
                _butterfly_8(x, i, step)
        step *= 8
    while step < n:
        for group in range(0, n, 2 * step):
            for i in range(group, group + step):
                _butterfly_2(x, i, step)
        step *= 2


@compiled
def hadamard_slice_cpu(rows, start, stop, first, key, out):
    """Project a slice with ``hadamard``. The arguments are those of ``rademacher_slice_cpu``."""
    n_samples = len(rows)
    proj_dim = out.shape[1]
    n_tiles = tiles_of(n_samples)
    sums = np.zeros((n_tiles, proj_dim * LANES), np.float32)
    total = np.zeros_like(sums)
    words = np.empty(max(proj_dim // 32, 4), np.uint32)
    row_signs, column_signs = np.empty(proj_dim, np.float32), np.empty(proj_dim, np.float32)
    x = np.zeros((1, proj_dim * LANES), np.float32)
    for block in range(first // proj_dim, (first + stop - start - 1) // proj_dim + 1):
        fill_signs(row_signs, words, 0, block, key)
        fill_signs(column_signs, words, COLUMN_SIGNS, block, key)
        for tile in range(n_tiles):
            samples = rows[tile * LANES : (tile + 1) * LANES]
            fill_lanes(x, samples, block * proj_dim - first + start, start, stop)
            for i in range(proj_dim):
                _multiply(x[0], i, row_signs[i])
            _transform(x[0], proj_dim)
            for column in range(proj_dim):
                _add_signed(sums[tile], column, x[0], column, column_signs[column])
        if block % _FLUSH_BLOCKS == _FLUSH_BLOCKS - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)


_TENSOR_SKETCH = ProjectionKind.TENSOR_SKETCH.tag
_BLOCK = 128  # coordinates that are copied to lanes at a time
_FREQUENCIES = 512  # number of complex numbers whose squares are summed at a time
_FLUSH = 32  # mean number of additions to a column's sum before the sum is added to the total


class Hashes(NamedTuple):
    """The buckets and signs that define a tensor sketch, for all parameters.

    ``buckets`` and ``signs`` contain the values for the rows of the first parameter, then those for
    its columns, then those for the rows of the second parameter, and so on.
    """

    starts: np.ndarray  # coordinate of each parameter's first entry, then n_params, int64
    shapes: np.ndarray  # number of rows and columns of each parameter, shape (n_parameters, 2)
    # The indices in ``buckets`` of each parameter's first row and column, shape (n_parameters, 2).
    positions: np.ndarray
    buckets: np.ndarray  # bucket of each row and column, int64
    signs: np.ndarray  # sign of each row and column, +1 or -1, float32


@lru_cache(maxsize=16)  # one entry for each checkpoint
def hashes_of(spec: ProjectionSpec) -> Hashes:
    """Return the buckets and signs that ``reference.py`` defines for a tensor sketch."""
    assert spec.shapes is not None
    key, k = key_of(spec), spec.proj_dim
    shapes = np.array(spec.shapes, np.int64)
    starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])
    ends = np.cumsum(shapes)
    positions = (ends - shapes.ravel()).reshape(-1, 2)
    buckets, signs = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.float32)
    for q, (at, n) in enumerate(zip(positions.ravel(), shapes.ravel(), strict=True)):
        n_words = -(-n // k) * k
        words = np.empty(-(-n_words // 4) * 4, np.uint32)
        fill_words(words, 0, q, _TENSOR_SKETCH, key)
        order = words[:n_words].reshape(-1, k).argsort(axis=1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(k)[None], axis=1)
        buckets[at : at + n] = ranks.reshape(-1)[:n]
        words = np.empty(-(-n // 128) * 4, np.uint32)
        fill_words(words, 2**31, q, _TENSOR_SKETCH, key)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:n]
        signs[at : at + n] = 1 - 2 * bits.astype(np.float32)
    return Hashes(starts, shapes, positions, buckets, signs)


@compiled
def tensor_sketch_slice_cpu(
    rows, start, stop, first, starts, shapes, positions, buckets, signs, out
):
    """Write the tensor sketch of a slice of the gradients to ``out``.

    The arguments are those of ``rademacher_slice_cpu``, with the fields of ``Hashes`` in place of
    ``key``.
    """
    n_samples = len(rows)
    proj_dim = out.shape[1]
    n_tiles = tiles_of(n_samples)
    sums = np.zeros((n_tiles, proj_dim * LANES), np.float32)
    total = np.zeros_like(sums)
    flush_blocks = max(_FLUSH * proj_dim // _BLOCK, 1)
    x = np.zeros((n_tiles, _BLOCK * LANES), np.float32)
    number = np.searchsorted(starts, first, side="right") - 1
    # i and j are the indices in ``buckets`` of the next coordinate's row and column.
    row, column = divmod(first - starts[number], shapes[number, 1])
    i, j = positions[number, 0] + row, positions[number, 1] + column
    i_stop = positions[number, 0] + shapes[number, 0]
    j_stop = positions[number, 1] + shapes[number, 1]
    for block in range(first // _BLOCK, (first + stop - start - 1) // _BLOCK + 1):
        at = block * _BLOCK - first + start
        fill_lanes(x, rows, at, start, stop)
        for c in range(max(0, start - at), min(_BLOCK, stop - at)):
            bucket = buckets[i] + buckets[j]
            if bucket >= proj_dim:
                bucket -= proj_dim
            sign = signs[i] * signs[j]
            for tile in range(n_tiles):
                _add_signed(sums[tile], bucket, x[tile], c, sign)
            j += 1
            if j == j_stop:
                i += 1
                if i == i_stop and number + 1 < len(positions):
                    number += 1
                    i, i_stop = positions[number, 0], positions[number, 0] + shapes[number, 0]
                    j_stop = positions[number, 1] + shapes[number, 1]
                j = positions[number, 1]
        if block % flush_blocks == flush_blocks - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)


@njit(fastmath={"reassoc"})
def _norm(numbers):
    """Return the norm of float32 numbers, computed in float64 so that no square overflows."""
    total = 0.0
    for number in numbers:
        total += np.float64(number) * np.float64(number)
    return np.sqrt(total)


@compiled
def fill_pairs_cpu(left, right, bucket0, sign0, bucket1, sign1, out, is_complex):
    """Write the count sketches of each token's two factors, ``left`` and ``right``, to ``out``.

    The factors have shapes (samples, tokens, n0) and (samples, tokens, n1). ``out`` has shape
    (tokens, samples, 2 k). All numbers are float32. The sketch of ``left`` comes first, then that
    of ``right``. If ``is_complex``, the entries of the two sketches alternate instead, as real and
    imaginary parts, and the two factors of each token are first scaled to equal norms. If one of
    them is 0, both are multiplied by 0.
    """
    step, second = (2, 1) if is_complex else (1, out.shape[2] // 2)
    scale0 = scale1 = np.float32(1)
    for b in range(len(left)):
        for t in range(left.shape[1]):
            if is_complex:
                norm0, norm1 = _norm(left[b, t]), _norm(right[b, t])
                scale0 = scale1 = np.float32(0)  # 0 times NaN or infinity is NaN
                if norm0 > 0 and norm1 > 0:
                    scale0 = np.float32(np.sqrt(norm1 / norm0))
                    scale1 = np.float32(np.sqrt(norm0 / norm1))
            row = out[t, b]
            row[:] = 0
            for i in range(left.shape[2]):
                row[step * bucket0[i]] += sign0[i] * (left[b, t, i] * scale0)
            for j in range(right.shape[2]):
                row[step * bucket1[j] + second] += sign1[j] * (right[b, t, j] * scale1)


@compiled
def add_squares_cpu(numbers, out):
    """Add the squares of complex numbers, summed over tokens, to ``out``.

    Real and imaginary parts alternate in both arrays. ``numbers`` has shape (tokens, samples, 2 k),
    float32, and ``out`` has shape (samples, 2 k), float64.
    """
    sums = np.empty(2 * _FREQUENCIES, np.float32)
    for b in range(len(out)):
        for first in range(0, out.shape[1], 2 * _FREQUENCIES):
            target = out[b, first : first + 2 * _FREQUENCIES]
            sums[:] = 0
            for t in range(len(numbers)):
                part = numbers[t, b, first : first + 2 * _FREQUENCIES]
                for f in range(len(target) // 2):
                    real, imaginary = part[2 * f], part[2 * f + 1]
                    sums[2 * f] += real * real - imaginary * imaginary
                    sums[2 * f + 1] += np.float32(2) * real * imaginary
            target += sums[: len(target)]

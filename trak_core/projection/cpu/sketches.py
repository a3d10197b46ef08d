"""Sketches on a CPU: block-Hadamard by fast transforms, tensor sketches by hashing.

A block of k coordinates costs the Hadamard projection log2(k) additions a coordinate, three steps
of the butterfly at a time in registers. A tensor sketch adds each coordinate to one column.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from trak_core.projection.cpu.simd_lanes import (
    LANES,
    LaneArrays,
    compiled,
    fill_from_lanes,
    fill_lanes,
    fill_words,
    flush,
    intrinsic,
    tiles_of,
)
from trak_core.spec import ProjectionKind, ProjectionSpec

_HADAMARD = ProjectionKind.HADAMARD.tag
_FLUSH_BLOCKS = 32  # blocks after which the sums go into the total
COLUMN_SIGNS = 2**31  # the first call of E_b; those of D_b begin at 0


def _butterfly(radix):
    """Make the transform of ``radix`` rows of lanes, ``step`` apart."""

    @intrinsic
    def butterfly(_, x, first, step):
        def generate(context, builder, signature, arguments):
            i64 = ir.IntType(64)
            lanes = LaneArrays(context, builder, signature, arguments)
            places = [
                builder.add(arguments[1], builder.mul(arguments[2], i64(i))) for i in range(radix)
            ]
            rows = [lanes.load(0, place) for place in places]
            half = 1
            while half < radix:
                for i in range(radix):
                    if not i & half:
                        low, high = rows[i], rows[i | half]
                        rows[i], rows[i | half] = builder.fadd(low, high), builder.fsub(low, high)
                half *= 2
            for row, place in zip(rows, places, strict=True):
                lanes.store(row, 0, place)
            return context.get_dummy_value()

        return types.void(x, first, step), generate

    return butterfly


_butterfly_2, _butterfly_8 = _butterfly(2), _butterfly(8)


@intrinsic
def _add_signed(_, sums, x, row, signs):
    """Add to a row of the sums that row of ``x`` times its sign."""

    def generate(context, builder, signature, arguments):
        lanes = LaneArrays(context, builder, signature, arguments)
        sign = lanes.spread(builder.load(lanes.pointer(3, arguments[2])))
        product = builder.fmul(lanes.load(1, arguments[2]), sign)
        lanes.store(builder.fadd(lanes.load(0, arguments[2]), product), 0, arguments[2])
        return context.get_dummy_value()

    return types.void(sums, x, row, signs), generate


@intrinsic
def _multiply(_, x, row, signs):
    """Multiply a row of ``x`` by its sign."""

    def generate(context, builder, signature, arguments):
        lanes = LaneArrays(context, builder, signature, arguments)
        sign = lanes.spread(builder.load(lanes.pointer(2, arguments[1])))
        lanes.store(builder.fmul(lanes.load(0, arguments[1]), sign), 0, arguments[1])
        return context.get_dummy_value()

    return types.void(x, row, signs), generate


@compiled
def fill_signs(signs, words, first_call, block, key):
    """Write the +1 and -1 of D_b or E_b."""
    fill_words(words, first_call, block, _HADAMARD, key)
    for i in range(len(signs)):
        bit = (words[i >> 5] >> np.uint32(i & 31)) & np.uint32(1)
        signs[i] = np.float32(1.0) - np.float32(2.0) * np.float32(bit)


@compiled
def _transform(x, n):
    """Replace n rows of lanes by their Walsh-Hadamard transform."""
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
    """Write ``rows[:, start:stop] @ R[first:]`` into ``out``.

    The arguments are those of ``rademacher_slice_cpu``.
    """
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
            eight = rows[tile * LANES : (tile + 1) * LANES]
            fill_lanes(x, eight, block * proj_dim - first + start, start, stop)
            for i in range(proj_dim):
                _multiply(x[0], i, row_signs)
            _transform(x[0], proj_dim)
            for column in range(proj_dim):
                _add_signed(sums[tile], x[0], column, column_signs)
        if block % _FLUSH_BLOCKS == _FLUSH_BLOCKS - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)


_TENSOR_SKETCH = ProjectionKind.TENSOR_SKETCH.tag
_BLOCK = 128  # coordinates put into lanes at once
_FREQUENCIES = 512  # complex numbers whose squares are summed at once
_FLUSH = 32  # additions a column, on average, after which the sums go into the total


@intrinsic
def add_signed(_, sums, column, x, coordinate, sign):
    """Add to the sums of ``column`` the lanes of ``coordinate``, times its sign."""

    def generate(context, builder, signature, arguments):
        lanes = LaneArrays(context, builder, signature, arguments)
        product = builder.fmul(lanes.load(2, arguments[3]), lanes.spread(arguments[4]))
        total = builder.fadd(lanes.load(0, arguments[1]), product)
        lanes.store(total, 0, arguments[1])
        return context.get_dummy_value()

    return types.void(sums, column, x, coordinate, sign), generate


class Sides(NamedTuple):
    """Buckets and signs of all sides, one after the other: rows, then columns of each parameter.

    Attributes:
        starts: Coordinate of each parameter's first entry, and where the last one ends, int64.
        places: Where each parameter's rows begin in the others, and its columns, shape (n, 2).
        buckets: Unsigned 32 bit.
        signs: +-1, float32.
    """

    starts: np.ndarray
    places: np.ndarray
    buckets: np.ndarray
    signs: np.ndarray

    def side(self, number: int, which: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return buckets and signs of one side of a parameter."""
        own = slice(self.places[number, which], self.places[number, which] + size)
        return self.buckets[own], self.signs[own]


@lru_cache(maxsize=16)  # checkpoints of one process
def sides_of(spec: ProjectionSpec) -> Sides:
    """Return buckets and signs of all sides (``reference.py``)."""
    assert spec.shapes is not None
    key = np.uint32(spec.seed & 0xFFFFFFFF), np.uint32(spec.seed >> 32), np.uint32(spec.stream)
    k = spec.proj_dim
    sizes = np.array(spec.shapes, np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes.prod(axis=1))])
    ends = np.cumsum(sizes)
    places = (ends - sizes.ravel()).reshape(-1, 2)
    buckets, signs = np.empty(ends[-1], np.uint32), np.empty(ends[-1], np.float32)
    for q, (at, n) in enumerate(zip(places.ravel(), sizes.ravel(), strict=True)):
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
    return Sides(starts, places, buckets, signs)


@compiled
def tensor_sketch_slice_cpu(rows, start, stop, first, starts, places, shapes, buckets, signs, out):
    """Write ``rows[:, start:stop] @ R[first:]`` into ``out``.

    The arguments are those of ``rademacher_slice_cpu``, but ``Sides`` with the parameters' shapes,
    (n, 2), int64, instead of a key.
    """
    n_samples = len(rows)
    proj_dim = out.shape[1]
    n_tiles = tiles_of(n_samples)
    sums = np.zeros((n_tiles, proj_dim * LANES), np.float32)
    total = np.zeros_like(sums)
    flush_blocks = max(_FLUSH * proj_dim // _BLOCK, 1)
    x = np.zeros((n_tiles, _BLOCK * LANES), np.float32)
    number = np.searchsorted(starts, first, side="right") - 1
    # Places of the next coordinate's row and column among all sides, and where its column ends.
    width = shapes[number, 1]
    row, column = divmod(first - starts[number], width)
    i, j = places[number, 0] + row, places[number, 1] + column
    j_stop = places[number, 1] + width
    i_stop = places[number, 0] + shapes[number, 0]
    for block in range(first // _BLOCK, (first + stop - start - 1) // _BLOCK + 1):
        at = block * _BLOCK - first + start
        fill_lanes(x, rows, at, start, stop)
        for c in range(max(0, start - at), min(_BLOCK, stop - at)):
            bucket = np.int64(buckets[i]) + np.int64(buckets[j])
            if bucket >= proj_dim:
                bucket -= proj_dim
            sign = signs[i] * signs[j]
            for tile in range(n_tiles):
                add_signed(sums[tile], bucket, x[tile], c, sign)
            j += 1
            if j == j_stop:
                i += 1
                if i == i_stop and number + 1 < len(places):
                    number += 1
                    i, i_stop = places[number, 0], places[number, 0] + shapes[number, 0]
                    j_stop = places[number, 1] + shapes[number, 1]
                j = places[number, 1]
        if block % flush_blocks == flush_blocks - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)


@compiled
def fill_pairs_cpu(left, right, scales, bucket0, sign0, bucket1, sign1, out, step, second):
    """Write count sketches of both factors of each token.

    Factors have shapes (tokens, n0) and (tokens, n1), and are multiplied first by ``scales``, shape
    (tokens, 2); ``out`` has (tokens, 2 k). Entry i of left's sketch is ``out[:, step * i]``, and
    ``second`` columns behind it stands right's. All are float32, buckets and signs as in ``Sides``.
    """
    for t in range(len(left)):
        row = out[t]
        row[:] = 0
        scale0, scale1 = scales[t]
        for i in range(left.shape[1]):
            row[step * bucket0[i]] += sign0[i] * (left[t, i] * scale0)
        for j in range(right.shape[1]):
            row[step * bucket1[j] + second] += sign1[j] * (right[t, j] * scale1)


@compiled
def add_squares_cpu(numbers, out):
    """Add the squares of complex numbers, real and imaginary parts in turn, over the tokens.

    They have shape (samples, tokens, 2 k), float32; ``out`` has (samples, 2 k), float64.
    """
    sums = np.empty(2 * _FREQUENCIES, np.float32)
    for b in range(len(numbers)):
        for first in range(0, out.shape[1], 2 * _FREQUENCIES):
            own = out[b, first : first + 2 * _FREQUENCIES]
            sums[:] = 0
            for t in range(numbers.shape[1]):
                part = numbers[b, t, first : first + 2 * _FREQUENCIES]
                for f in range(len(own) // 2):
                    real, imaginary = part[2 * f], part[2 * f + 1]
                    sums[2 * f] += real * real - imaginary * imaginary
                    sums[2 * f + 1] += np.float32(2) * real * imaginary
            own += sums[: len(own)]

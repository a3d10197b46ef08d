"""The block-Hadamard projection on a CPU: a fast Walsh-Hadamard transform of each block.

A block of k coordinates costs log2(k) additions a coordinate, three steps of the butterfly at a
time in registers.
"""

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
from trak_core.spec import ProjectionKind

_TAG = ProjectionKind.HADAMARD.tag
_FLUSH = 32  # blocks after which the sums go into the total
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
    fill_words(words, first_call, block, _TAG, key)
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
        if block % _FLUSH == _FLUSH - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)

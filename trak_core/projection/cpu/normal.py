"""The normal projection on a CPU: a small tile of R at a time, multiplied while it is in cache."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

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

_TAG = ProjectionKind.NORMAL.tag
_ROWS = 16  # coordinates of a tile of R
_WIDTH = 256  # columns of a tile of R
_GROUP = 8  # columns whose sums stay in registers
_FLUSH = 32  # tiles of R after which the sums go into the total
_SD = np.float32(1 / 147.80166)
_C1, _C3, _C5 = np.float32(0.967765), np.float32(0.004002), np.float32(0.001905)


@njit(inline="always")
def normal_entry(word):
    """Return the entry of a word: the centred sum of its bytes through a quintic.

    Every operation is rounded by itself, in this order (``reference.py``).

    Returns:
        A float32.
    """
    pairs = (word & np.uint32(0x00FF00FF)) + ((word >> np.uint32(8)) & np.uint32(0x00FF00FF))
    byte_sum = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
    x = np.float32(np.int32(byte_sum) - np.int32(510)) * _SD
    x2 = x * x
    p = _C5 * x2 + _C3
    p = p * x2 + _C1
    return p * x


@intrinsic
def _add_products(_, sums, column, x, entries, first_entry):
    """Add to the sums of 8 columns the products of 16 coordinates with their entries."""
    # Entries lie a coordinate after another, _WIDTH apart, from the first column's on.

    def generate(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        lanes = LaneArrays(context, builder, signature, arguments)
        columns = [builder.add(arguments[1], i64(i)) for i in range(_GROUP)]
        before = [lanes.load(0, column) for column in columns]
        vectors = ir.FunctionType(before[0].type, [before[0].type] * 3)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, vectors, f"llvm.fmuladd.v{LANES}f32"
        )
        totals: list[ir.Value] = []
        for row in range(_ROWS):
            vector = lanes.load(2, i64(row))
            for i in range(_GROUP):
                at = builder.add(arguments[4], i64(row * _WIDTH + i))
                entry = lanes.spread(builder.load(lanes.pointer(3, at)))
                if row == 0:
                    totals.append(builder.fmul(vector, entry))
                else:
                    totals[i] = builder.call(multiply_add, [vector, entry, totals[i]])
        for column, total, old in zip(columns, totals, before, strict=True):
            lanes.store(builder.fadd(old, total), 0, column)
        return context.get_dummy_value()

    return types.void(sums, column, x, entries, first_entry), generate


@compiled
def normal_slice_cpu(rows, start, stop, first, key, out):
    """Write ``rows[:, start:stop] @ R[first:]`` into ``out``.

    The arguments are those of ``rademacher_slice_cpu``.
    """
    n_samples = len(rows)
    n_tiles = tiles_of(n_samples)
    n_columns = (out.shape[1] + _WIDTH - 1) // _WIDTH * _WIDTH
    sums = np.zeros((n_tiles, n_columns * LANES), np.float32)
    total = np.zeros_like(sums)
    words = np.empty(_WIDTH, np.uint32)
    entries = np.empty(_ROWS * _WIDTH, np.float32)
    x = np.zeros((n_tiles, _ROWS * LANES), np.float32)
    for block in range(first // _ROWS, (first + stop - start - 1) // _ROWS + 1):
        fill_lanes(x, rows, block * _ROWS - first + start, start, stop)
        for left in range(0, n_columns, _WIDTH):
            width = min(_WIDTH, (out.shape[1] - left + _GROUP - 1) // _GROUP * _GROUP)
            for row in range(_ROWS):
                fill_words(words[:width], left // 4, block * _ROWS + row, _TAG, key)
                for i in range(width):
                    entries[row * _WIDTH + i] = normal_entry(words[i])
            for tile in range(n_tiles):
                for i in range(0, width, _GROUP):
                    _add_products(sums[tile], left + i, x[tile], entries, i)
        if block % _FLUSH == _FLUSH - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)

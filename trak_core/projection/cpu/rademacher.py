"""The rademacher projection on a CPU by the method of Four Russians.

Four coordinates of one sample can enter a sum with 16 patterns of signs. So for every four
coordinates the 16 signed sums are tabled once, and each column then costs one table row, picked by
four bits of its random word, where a product with a matrix would cost four multiplications and the
making of four entries.

Source: Arlazarov, Dinic, Kronrod, Faradzev, "On economical construction of the transitive closure
of a directed graph", Soviet Mathematics Doklady 11, 1970 (tables of the sums of few rows).
"""

import numpy as np
from llvmlite import ir
from numba import types

from trak_core.projection.compiled import compiled
from trak_core.projection.cpu.lanes import LANES, LaneArrays, intrinsic, tiles_of
from trak_core.projection.cpu.transpose import fill_from_lanes, fill_lanes
from trak_core.projection.philox import fill_words
from trak_core.spec import ProjectionKind

_TAG = ProjectionKind.RADEMACHER.tag
_BLOCK = 128  # coordinates that four words of a column serve
_WORDS = 4  # words of a column and block
_NIBBLES = 8  # of a word
_CHAINS = 4  # sums that grow side by side, to hide the latency of an addition


@intrinsic
def _fill_table(_, tables, table, x, coordinate):
    """Table the 16 signed sums of four coordinates, 8 apart: bit i of a row is the sign of i."""

    def generate(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        lanes = LaneArrays(context, builder, signature, arguments)
        a, b, c, d = (lanes.load(2, builder.add(arguments[3], i64(8 * i))) for i in range(4))
        halves = []
        for p, q in ((a, b), (c, d)):
            total, difference = builder.fadd(p, q), builder.fsub(p, q)
            halves.append((total, builder.fneg(difference), difference, builder.fneg(total)))
        first = builder.mul(arguments[1], i64(16))
        for i, high in enumerate(halves[1]):
            for j, low in enumerate(halves[0]):
                lanes.store(builder.fadd(high, low), 0, builder.add(first, i64(4 * i + j)))
        return context.get_dummy_value()

    return types.void(tables, table, x, coordinate), generate


@intrinsic
def _add_table_rows(_, sums, tables, words, column, n_columns):
    """Add to the sums of ``column`` the table rows that its words pick, one a nibble."""

    def generate(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        lanes = LaneArrays(context, builder, signature, arguments)
        chains = []
        for i in range(_WORDS):
            at = builder.add(arguments[3], builder.mul(i64(i), arguments[4]))
            word = builder.zext(builder.load(lanes.pointer(2, at)), i64)
            for nibble in range(_NIBBLES):
                pattern = builder.and_(builder.lshr(word, i64(4 * nibble)), i64(15))
                row = builder.add(pattern, i64(16 * (i * _NIBBLES + nibble)))
                vector = lanes.load(1, row)
                full = len(chains) == _CHAINS
                chains.append(builder.fadd(chains.pop(0), vector) if full else vector)
        while len(chains) > 1:
            chains.append(builder.fadd(chains.pop(0), chains.pop(0)))
        total = builder.fadd(lanes.load(0, arguments[3]), chains[0])
        lanes.store(total, 0, arguments[3])
        return context.get_dummy_value()

    return types.void(sums, tables, words, column, n_columns), generate


@compiled
def rademacher_slice_cpu(rows, start, stop, first, key, out):
    """Write ``rows[:, start:stop] @ R[first:]`` into ``out``.

    Args:
        rows: Shape (n_samples, any), float32.
        start: The first column to project.
        stop: The column after the last, above ``start``.
        first: Coordinate of column ``start``.
        key: As for ``fill_words``.
        out: Shape (n_samples, proj_dim), float32.
    """
    n_samples = len(rows)
    n_columns = (out.shape[1] + 3) // 4 * 4
    n_tiles = tiles_of(n_samples)
    sums = np.zeros((n_tiles, n_columns * LANES), np.float32)
    words = np.empty((_WORDS, n_columns), np.uint32)
    tables = np.empty(_WORDS * _NIBBLES * 16 * LANES, np.float32)
    x = np.zeros((n_tiles, _BLOCK * LANES), np.float32)
    for block in range(first // _BLOCK, (first + stop - start - 1) // _BLOCK + 1):
        fill_lanes(x, rows, block * _BLOCK - first + start, start, stop)
        for t in range(_WORDS):
            fill_words(words[t], 0, 4 * block + t, _TAG, key)
        for tile in range(n_tiles):
            for t in range(_WORDS):
                for nibble in range(_NIBBLES):
                    coordinate = 32 * (nibble & 3) + 2 * t + (nibble >> 2)
                    _fill_table(tables, t * _NIBBLES + nibble, x[tile], coordinate)
            for column in range(n_columns):
                _add_table_rows(sums[tile], tables, words, column, n_columns)
    fill_from_lanes(out, sums)

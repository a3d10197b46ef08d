"""Project on a CPU by dense matrices of independent entries: rademacher and normal.

``normal`` makes a small tile of R at a time, multiplied while it is in cache. ``rademacher`` uses
the method of Four Russians. Four coordinates of one sample can enter a sum with 16 patterns of
signs. So for every four coordinates the 16 signed sums are tabled once, and each column then costs
one table row, picked by four bits of its random word, where a product with a matrix would cost four
multiplications and the making of four entries. Where vectors are wide, two tiles of samples share
the picking.

Source: Arlazarov, Dinic, Kronrod, Faradzev, "On economical construction of the transitive closure
of a directed graph", Soviet Mathematics Doklady 11, 1970 (tables of the sums of few rows).
"""

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
    holds_two_tiles,
    intrinsic,
    tiles_of,
)
from trak_core.spec import ProjectionKind

_RADEMACHER = ProjectionKind.RADEMACHER.tag
_BLOCK = 128  # coordinates that four words of a column serve
_WORDS = 4  # words of a column and block
_NIBBLES = 8  # of a word
_CHAINS = 4  # sums that grow side by side, to hide the latency of an addition


@compiled
def _aligned(n):
    """Return n float32, without content, that begin with a line of the cache."""
    buffer = np.empty(n + 16, np.float32)
    first = -buffer.ctypes.data % 64 // 4
    return buffer[first : first + n]


def _fill_table(n):
    """Make the filling of the table for n tiles, one or two, side by side in its rows."""

    @intrinsic
    def fill_table(_, tables, table, x, row):
        """Table the 16 signed sums of four rows of x, 8 apart: bit i is the sign of the i-th."""

        def generate(context, builder, signature, arguments):
            i64 = ir.IntType(64)
            lanes = LaneArrays(context, builder, signature, arguments)
            places = [
                [builder.add(arguments[3], i64(8 * i + tile * _BLOCK)) for tile in range(n)]
                for i in range(4)
            ]
            a, b, c, d = (lanes.gather(2, place) for place in places)
            halves = []
            for p, q in ((a, b), (c, d)):
                total, difference = builder.fadd(p, q), builder.fsub(p, q)
                halves.append((total, builder.fneg(difference), difference, builder.fneg(total)))
            first = builder.mul(arguments[1], i64(16 * n))
            for i, high in enumerate(halves[1]):
                for j, low in enumerate(halves[0]):
                    at = builder.add(first, i64((4 * i + j) * n))
                    lanes.store(builder.fadd(high, low), 0, at, n)
            return context.get_dummy_value()

        return types.void(tables, table, x, row), generate

    return fill_table


def _add_table_rows(n):
    """Make the addition that goes with ``_fill_table(n)``."""

    @intrinsic
    def add_table_rows(_, sums, row, tables, words, column, n_columns):
        """Add to the sums of ``column`` the table rows that its words pick, one a nibble."""

        def generate(context, builder, signature, arguments):
            i64 = ir.IntType(64)
            lanes = LaneArrays(context, builder, signature, arguments)
            chains = []
            for i in range(_WORDS):
                at = builder.add(arguments[4], builder.mul(i64(i), arguments[5]))
                word = builder.zext(builder.load(lanes.pointer(3, at)), i64)
                for nibble in range(_NIBBLES):
                    pattern = builder.and_(builder.lshr(word, i64(4 * nibble)), i64(15))
                    picked = builder.add(pattern, i64(16 * (i * _NIBBLES + nibble)))
                    vector = lanes.load(2, builder.mul(picked, i64(n)), n)
                    full = len(chains) == _CHAINS
                    chains.append(builder.fadd(chains.pop(0), vector) if full else vector)
            while len(chains) > 1:
                chains.append(builder.fadd(chains.pop(0), chains.pop(0)))
            first = builder.add(arguments[1], arguments[4])
            places = [builder.add(first, builder.mul(arguments[5], i64(t))) for t in range(n)]
            total = builder.fadd(lanes.gather(0, places), chains[0])
            lanes.scatter(total, 0, places)
            return context.get_dummy_value()

        return types.void(sums, row, tables, words, column, n_columns), generate

    return add_table_rows


_fill_for_one, _fill_for_two = _fill_table(1), _fill_table(2)
_add_to_one, _add_to_two = _add_table_rows(1), _add_table_rows(2)


@compiled
def _project_slice(rows, start, stop, first, key, in_pairs, out):
    """Do what ``rademacher_slice_cpu`` does, in pairs of tiles or one by one: the same bits."""
    n_samples = len(rows)
    n_columns = (out.shape[1] + 3) // 4 * 4
    n_tiles = tiles_of(n_samples)
    sums = np.zeros((n_tiles, n_columns * LANES), np.float32)
    words = np.empty((_WORDS, n_columns), np.uint32)
    tables = _aligned(_WORDS * _NIBBLES * 16 * 2 * LANES)
    x = np.zeros((n_tiles, _BLOCK * LANES), np.float32)
    for block in range(first // _BLOCK, (first + stop - start - 1) // _BLOCK + 1):
        fill_lanes(x, rows, block * _BLOCK - first + start, start, stop)
        for t in range(_WORDS):
            fill_words(words[t], 0, 4 * block + t, _RADEMACHER, key)
        tile = 0
        while tile < n_tiles:
            two = in_pairs and tile + 1 < n_tiles
            for t in range(_WORDS):
                for nibble in range(_NIBBLES):
                    row = tile * _BLOCK + 32 * (nibble & 3) + 2 * t + (nibble >> 2)
                    if two:
                        _fill_for_two(tables, t * _NIBBLES + nibble, x, row)
                    else:
                        _fill_for_one(tables, t * _NIBBLES + nibble, x, row)
            first_sum = tile * n_columns
            for column in range(n_columns):
                if two:
                    _add_to_two(sums, first_sum, tables, words, column, n_columns)
                else:
                    _add_to_one(sums, first_sum, tables, words, column, n_columns)
            tile += 2 if two else 1
    fill_from_lanes(out, sums)


def rademacher_slice_cpu(
    rows: np.ndarray,
    start: int,
    stop: int,
    first: int,
    key: tuple[np.uint32, np.uint32, np.uint32],
    out: np.ndarray,
) -> None:
    """Write ``rows[:, start:stop] @ R[first:]`` into ``out``, shape (n_samples, proj_dim), float32.

    ``first`` is the coordinate of column ``start``, the key as for ``fill_words``.
    """
    _project_slice(rows, start, stop, first, key, holds_two_tiles(), out)


_NORMAL = ProjectionKind.NORMAL.tag
_ROWS = 16  # coordinates of a tile of R
_WIDTH = 256  # columns of a tile of R
_GROUP = 8  # columns whose sums stay in registers
_FLUSH = 32  # tiles of R after which the sums go into the total
_SD = np.float32(1 / 147.80166)
_C1, _C3, _C5 = np.float32(0.967765), np.float32(0.004002), np.float32(0.001905)


@njit(inline="always")
def normal_entry(word):
    """Return the entry of a word: the centred sum of its bytes through a quintic, in float32.

    Every operation is rounded by itself, in this order (``reference.py``).
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
                fill_words(words[:width], left // 4, block * _ROWS + row, _NORMAL, key)
                for i in range(width):
                    entries[row * _WIDTH + i] = normal_entry(words[i])
            for tile in range(n_tiles):
                for i in range(0, width, _GROUP):
                    _add_products(sums[tile], left + i, x[tile], entries, i)
        if block % _FLUSH == _FLUSH - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)

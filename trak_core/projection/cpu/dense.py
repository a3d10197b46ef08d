"""Project on a CPU with dense matrices of independent entries, ``rademacher`` and ``normal``.

R is the projection matrix. For ``normal``, a small tile of R is formed at a time, and gradients are
multiplied by this tile while it is in the cache.

``rademacher`` uses the Method of Four Russians. Each column of R adds up a sample's coordinates
with random signs. For four coordinates, only 16 patterns of signs are possible, so their 16 signed
sums are computed once and stored in a table. For each column, four bits of the column's random word
select the table row that is added. A matrix product would instead need four multiplications and
four entries of R. On processors with wide vectors, a table row contains the sums of two tiles of
eight samples.

Source: Arlazarov, Dinic, Kronrod, Faradzev, "On economical construction of the transitive closure
of a directed graph", Soviet Mathematics Doklady 11, 1970 (tables of the sums of a few rows).
"""

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from trak_core.projection.cpu.simd_lanes import (
    INT64,
    LANES,
    compiled,
    fill_from_lanes,
    fill_lanes,
    fill_words,
    flush,
    holds_two_tiles,
    spread,
    tiles_of,
    vector_intrinsic,
)
from trak_core.settings import ProjectionKind

_RADEMACHER = ProjectionKind.RADEMACHER.tag
_BLOCK = 128  # coordinates whose signs are in the same four words for a column
_WORDS = 4  # words for one column and block
_NIBBLES = 8  # groups of 4 bits in a word
_CHAINS = 4  # independent sums, which hide the latency of additions


@compiled
def _aligned(n):
    """Return an uninitialized float32 array of length n that starts at a multiple of 64 bytes."""
    buffer = np.empty(n + 16, np.float32)
    first = -buffer.ctypes.data % 64 // 4
    return buffer[first : first + n]


def _fill_table(n):
    """Return the intrinsic that fills a table of signed sums for n tiles (1 or 2) of samples."""

    @vector_intrinsic
    def fill_table(builder, tables, table, x, row):
        """Store 16 sums of the rows row, row + 8, row + 16 and row + 24 of ``x``.

        The sums differ in the signs of the rows. If bit i of a sum's index in the table is set,
        row + 8 i has a minus sign, else a plus sign.
        """
        positions = [
            [builder.add(row, INT64(8 * i + tile * _BLOCK)) for tile in range(n)] for i in range(4)
        ]
        a, b, c, d = (x.gather(rows) for rows in positions)
        halves = []
        for p, q in ((a, b), (c, d)):
            total, difference = builder.fadd(p, q), builder.fsub(p, q)
            halves.append((total, builder.fneg(difference), difference, builder.fneg(total)))
        first = builder.mul(table, INT64(16 * n))
        for i, high in enumerate(halves[1]):
            for j, low in enumerate(halves[0]):
                at = builder.add(first, INT64((4 * i + j) * n))
                tables.store(builder.fadd(high, low), at, n)

    return fill_table


def _add_table_rows(n):
    """Return the intrinsic that uses the tables of ``_fill_table(n)`` to compute a projection."""

    @vector_intrinsic
    def add_table_rows(builder, sums, row, tables, words, column, n_columns):
        """Add the products of 128 coordinates and a column of R to the column's sums.

        Every 4 bits of the column's random words select the table row with the signed sum of four
        coordinates.
        """
        chains = []
        for i in range(_WORDS):
            at = builder.add(column, builder.mul(INT64(i), n_columns))
            word = builder.zext(builder.load(words.pointer(at)), INT64)
            for nibble in range(_NIBBLES):
                pattern = builder.and_(builder.lshr(word, INT64(4 * nibble)), INT64(15))
                table_row = builder.add(pattern, INT64(16 * (i * _NIBBLES + nibble)))
                vector = tables.load(builder.mul(table_row, INT64(n)), n)
                if len(chains) == _CHAINS:
                    vector = builder.fadd(chains.pop(0), vector)
                chains.append(vector)
        while len(chains) > 1:
            chains.append(builder.fadd(chains.pop(0), chains.pop(0)))
        first = builder.add(row, column)
        targets = [builder.add(first, builder.mul(n_columns, INT64(t))) for t in range(n)]
        sums.scatter(builder.fadd(sums.gather(targets), chains[0]), targets)

    return add_table_rows


_fill_for_one, _fill_for_two = _fill_table(1), _fill_table(2)
_add_to_one, _add_to_two = _add_table_rows(1), _add_table_rows(2)


@compiled
def _project_slice(rows, start, stop, first, key, in_pairs, out):
    """Do what ``rademacher_slice_cpu`` does, for 16 samples at a time if ``in_pairs``, else 8."""
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
    """Write ``rows[:, start:stop] @ R[first : first + stop - start]`` to ``out``.

    ``out`` has shape (n_samples, proj_dim), float32. Column ``start`` of ``rows`` is multiplied by
    row ``first`` of R. ``key`` is the result of ``key_of``, from which R is computed.
    """
    _project_slice(rows, start, stop, first, key, holds_two_tiles(), out)


_NORMAL = ProjectionKind.NORMAL.tag
_ROWS = 16  # coordinates of a tile of R
_WIDTH = 256  # columns of a tile of R
_GROUP = 8  # columns whose sums stay in registers
_FLUSH = 32  # tiles of R after which the sums are added to the total
_SD = np.float32(1 / 147.80166)
_C1, _C3, _C5 = np.float32(0.967765), np.float32(0.004002), np.float32(0.001905)


@njit(inline="always")
def normal_entry(word):
    """Return the normally distributed entry of R that ``reference.py`` defines for a random word.

    The order of the operations must not change, because each operation is rounded to float32.
    """
    pairs = (word & np.uint32(0x00FF00FF)) + ((word >> np.uint32(8)) & np.uint32(0x00FF00FF))
    byte_sum = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
    x = np.float32(np.int32(byte_sum) - np.int32(510)) * _SD
    x2 = x * x
    p = _C5 * x2 + _C3
    p = p * x2 + _C1
    return p * x


@vector_intrinsic
def _add_products(builder, sums, column, x, entries, first_entry):
    """Add the products of gradients and R for 16 coordinates to the sums of 8 columns.

    ``entries`` is a tile of R, with a row of _WIDTH entries for each coordinate.
    """
    columns = [builder.add(column, INT64(i)) for i in range(_GROUP)]
    before = [sums.load(column) for column in columns]
    vectors = ir.FunctionType(before[0].type, [before[0].type] * 3)
    multiply_add = cgutils.get_or_insert_function(
        builder.module, vectors, f"llvm.fmuladd.v{LANES}f32"
    )
    totals: list[ir.Value] = []
    for row in range(_ROWS):
        vector = x.load(INT64(row))
        for i in range(_GROUP):
            at = builder.add(first_entry, INT64(row * _WIDTH + i))
            entry = spread(builder, builder.load(entries.pointer(at)))
            if row == 0:
                totals.append(builder.fmul(vector, entry))
            else:
                totals[i] = builder.call(multiply_add, [vector, entry, totals[i]])
    for column, total, old in zip(columns, totals, before, strict=True):
        sums.store(builder.fadd(old, total), column)


@compiled
def normal_slice_cpu(rows, start, stop, first, key, out):
    """Project a slice with ``normal``. The arguments are those of ``rademacher_slice_cpu``."""
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

"""From rows of samples to lanes, and back."""

from typing import Any

from llvmlite import ir
from numba import types

from trak_core.projection.compiled import compiled
from trak_core.projection.cpu.lanes import LANES, LaneArrays, intrinsic


def _interleaved(builder: Any, first: Any, second: Any, width: int) -> tuple[Any, Any]:
    """Swap blocks of ``width`` lanes between two rows: one step of a transposition."""
    low = [i if not i & width else i - width + LANES for i in range(LANES)]
    high = [i + width if not i & width else i + LANES for i in range(LANES)]
    i32 = ir.IntType(32)
    masks = [ir.Constant(ir.VectorType(i32, LANES), mask) for mask in (low, high)]
    return tuple(builder.shuffle_vector(first, second, mask) for mask in masks)


@intrinsic
def _transpose(_, x, row, matrix, first, column):
    """Write an 8 x 8 piece of a matrix, whose columns lie side by side, into 8 rows of lanes."""

    def generate(context, builder, signature, arguments):
        lanes = LaneArrays(context, builder, signature, arguments)
        i64 = ir.IntType(64)
        rows = [
            lanes.strided(2, (builder.add(arguments[3], i64(i)), arguments[4]))
            for i in range(LANES)
        ]
        for width in (1, 2, 4):
            for i in range(LANES):
                if not i & width:
                    rows[i], rows[i + width] = _interleaved(
                        builder, rows[i], rows[i + width], width
                    )
        for i in range(LANES):
            lanes.store(rows[i], 0, builder.add(arguments[1], i64(i)))
        return context.get_dummy_value()

    return types.void(x, row, matrix, first, column), generate


@compiled
def fill_lanes(x, rows, at, start, stop):
    """Copy the columns ``at, at + 1, ...`` of ``rows`` from start to stop into lanes.

    Args:
        x: Shape (n_tiles, n * 8), float32; zeros for columns outside of start to stop.
        rows: Shape (n_samples, any), float32.
        at: Column for the first row of lanes; may lie before ``start``.
        start: First column to be read.
        stop: The column after the last.
    """
    n = x.shape[1] // LANES
    if at < start or at + n > stop:
        x[:] = 0
    begin, end = max(at, start), min(at + n, stop)
    whole, rest = 0, begin
    if rows.strides[1] == rows.itemsize:
        whole = len(rows) // LANES
        rest += (end - begin) // LANES * LANES
    for tile in range(whole):
        for i in range(begin, rest, LANES):
            _transpose(x[tile], i - at, rows, tile * LANES, i)
    for sample in range(len(rows)):
        tile, lane = sample // LANES, sample % LANES
        for i in range(rest if tile < whole else begin, end):
            x[tile, (i - at) * LANES + lane] = rows[sample, i]


@compiled
def fill_from_lanes(out, sums):
    """Copy sums of shape (n_tiles, at least proj_dim * 8) to ``out``, (n_samples, proj_dim)."""
    n_samples, proj_dim = out.shape
    for sample in range(n_samples):
        tile, lane = sample // LANES, sample % LANES
        for column in range(proj_dim):
            out[sample, column] = sums[tile, column * LANES + lane]

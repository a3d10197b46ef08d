"""Eight samples side by side: the layout of the CPU kernels, and vector operations on it.

Samples come in tiles of eight, one lane each; what belongs to one coordinate or one column of a
tile is a row of eight float32. A sample's numbers depend on its own lane alone, so the batch it
comes in changes nothing, and the lanes beyond the last sample hold zeros.

LLVM doesn't find these vectors by itself in loops over the lanes: the intrinsics write them down.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import extending

from trak_core.projection.compiled import compiled

LANES = 8
# Typed here because the function called has one argument less than the one that is decorated.
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = extending.intrinsic
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class LaneArrays:
    """The float32 array arguments of an intrinsic, read and written a row of lanes at a time."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]):
        """Take what Numba gives to a code generator."""
        self._context, self._builder = context, builder
        self._types, self._arguments = signature.args, arguments

    def pointer(self, argument: int, index: Any) -> Any:
        """Return a pointer to entry ``index`` of an array argument."""
        array = self._context.make_array(self._types[argument])(
            self._context, self._builder, self._arguments[argument]
        )
        return self._builder.gep(array.data, [index])

    def _row(self, argument: int, row: Any) -> Any:
        first = self._builder.mul(row, ir.IntType(64)(LANES))
        return self._builder.bitcast(self.pointer(argument, first), _VECTOR.as_pointer())

    def load(self, argument: int, row: Any) -> Any:
        """Return a row of lanes of an array argument."""
        vector = self._builder.load(self._row(argument, row))
        vector.align = 4
        return vector

    def store(self, vector: Any, argument: int, row: Any) -> None:
        """Write a row of lanes of an array argument."""
        self._builder.store(vector, self._row(argument, row)).align = 4

    def spread(self, number: Any) -> Any:
        """Return a row of lanes that all hold one float32."""
        i32 = ir.IntType(32)
        one = self._builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, i32(0))
        zeros = ir.Constant(ir.VectorType(i32, LANES), [0] * LANES)
        return self._builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)


@compiled
def tiles_of(n_samples):
    """Return the number of tiles."""
    return (n_samples + LANES - 1) // LANES


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
    for sample in range(len(rows)):
        tile, lane = sample // LANES, sample % LANES
        for i in range(begin, end):
            x[tile, (i - at) * LANES + lane] = rows[sample, i]


@compiled
def fill_from_lanes(out, sums):
    """Copy sums of shape (n_tiles, at least proj_dim * 8) to ``out``, (n_samples, proj_dim)."""
    n_samples, proj_dim = out.shape
    for sample in range(n_samples):
        tile, lane = sample // LANES, sample % LANES
        for column in range(proj_dim):
            out[sample, column] = sums[tile, column * LANES + lane]


@compiled
def flush(total, sums):
    """Add sums to a total and empty them: float32 keeps more digits of a sum of short sums."""
    total = total.reshape(-1)
    sums = sums.reshape(-1)
    for i in range(len(total)):
        total[i] += sums[i]
        sums[i] = 0

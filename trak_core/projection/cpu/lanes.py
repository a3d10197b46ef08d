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

    def strided(self, argument: int, index: Sequence[Any]) -> Any:
        """Return eight numbers side by side of a matrix argument, whatever its strides."""
        array = self._context.make_array(self._types[argument])(
            self._context, self._builder, self._arguments[argument]
        )
        at = self._builder.ptrtoint(array.data, ir.IntType(64))
        for i, axis in enumerate(index):
            stride = self._builder.extract_value(array.strides, i)
            at = self._builder.add(at, self._builder.mul(axis, stride))
        vector = self._builder.load(self._builder.inttoptr(at, _VECTOR.as_pointer()))
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
def flush(total, sums):
    """Add sums to a total and empty them: float32 keeps more digits of a sum of short sums."""
    total = total.reshape(-1)
    sums = sums.reshape(-1)
    for i in range(len(total)):
        total[i] += sums[i]
        sums[i] = 0

"""Functions to compile CPU kernels, and to generate their vector instructions and random words.

Samples are grouped into tiles of eight, with one sample in each lane of a vector register. For each
coordinate of the gradients or column of the result, a tile contains a *row of lanes*: eight float32
numbers. The results of a sample are computed in the sample's lane and do not depend on the other
samples of the batch. Lanes without a sample are zero.

Numba intrinsics generate the vector instructions, because LLVM would not vectorize loops over the
lanes.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, extending, njit, types

from trak_core.dependency_digests import code_digest
from trak_core.settings import ProjectionSpec

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF = np.uint64(32)


# Numba caches compiled code until the kernel's file changes. It does not detect changes in other
# modules that the kernel uses, so each version of the projection's source has its own cache folder.
_CACHE_FOLDER = Path(
    os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).with_name("__pycache__"),
    code_digest("projection"),
)


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function that Numba compiles when it is first called.

    Calls release the global interpreter lock. Machine code is cached in NUMBA_CACHE_DIR if this
    variable is set, else in ``__pycache__`` next to this file, or in the user's cache folder if
    ``__pycache__`` is not writable.
    """
    # ``njit`` reads the cache folder from this setting.
    before = config.CACHE_DIR  # pyright: ignore[reportAttributeAccessIssue]
    config.CACHE_DIR = str(_CACHE_FOLDER)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before  # pyright: ignore[reportAttributeAccessIssue]


@njit(inline="always")
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return the four random words of Philox4x32-10 for a counter and a key, all ``uint32``.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    for _ in range(10):
        p0, p1 = _M0 * np.uint64(c0), _M1 * np.uint64(c2)
        c0, c2 = np.uint32(p1 >> _HALF) ^ c1 ^ k0, np.uint32(p0 >> _HALF) ^ c3 ^ k1
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@compiled
def fill_words(words, first_call, q, tag, key):
    """Fill ``words``, uint32, length 4 n, with the four random words of each of n Philox calls.

    In the counters that ``reference.py`` defines, the calls have c0 = first_call, first_call + 1,
    ... and the same q < 2^56. ``tag`` is the tag of the kind of projection, and ``key`` is the
    result of ``key_of``.
    """
    seed_low, seed_high, stream = key
    low, high = np.uint32(q & 0xFFFFFFFF), np.uint32((q >> 32) | (tag << 24))
    for i in range(len(words) // 4):
        call = np.uint32(first_call + i)
        w0, w1, w2, w3 = philox4x32(call, low, high, stream, seed_low, seed_high)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3


def key_of(spec: ProjectionSpec) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Return the argument ``key`` of ``fill_words``: both halves of the seed, and the stream."""
    return np.uint32(spec.seed & 0xFFFFFFFF), np.uint32(spec.seed >> 32), np.uint32(spec.stream)


LANES = 8
INT64 = ir.IntType(64)
_INT32 = ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class LaneArray:
    """Generate code that reads and writes an array, which is an argument of an intrinsic.

    A *row of lanes* consists of eight consecutive float32 numbers, one for each of eight samples.
    """

    def __init__(self, context: Any, builder: Any, kind: types.Array, value: Any):
        """Take numba's context and code builder, and the type and value of the argument."""
        self._array = partial(context.make_array(kind), context, builder, value)
        self._builder = builder

    def pointer(self, index: Any) -> Any:
        """Return a pointer to the entry at a flat index."""
        return self._builder.gep(self._array().data, [index])

    def _row(self, row: Any, n: int) -> Any:
        first = self._builder.mul(row, INT64(LANES))
        vector = ir.VectorType(ir.FloatType(), n * LANES)
        return self._builder.bitcast(self.pointer(first), vector.as_pointer())

    def load(self, row: Any, n: int = 1) -> Any:
        """Return n consecutive rows of lanes, starting with number ``row``, as one vector."""
        vector = self._builder.load(self._row(row, n))
        vector.align = 4
        return vector

    def strided(self, index: Sequence[Any]) -> Any:
        """Return eight consecutive numbers of a matrix row, starting at ``index``.

        The rows of the matrix may have any stride.
        """
        array = self._array()
        at = self._builder.ptrtoint(array.data, INT64)
        for i, axis in enumerate(index):
            stride = self._builder.extract_value(array.strides, i)
            at = self._builder.add(at, self._builder.mul(axis, stride))
        vector = self._builder.load(self._builder.inttoptr(at, _VECTOR.as_pointer()))
        vector.align = 4
        return vector

    def store(self, vector: Any, row: Any, n: int = 1) -> None:
        """Write a vector to n consecutive rows of lanes, starting with number ``row``."""
        self._builder.store(vector, self._row(row, n)).align = 4

    def gather(self, rows: Sequence[Any]) -> Any:
        """Return one or two rows of lanes as one vector. ``rows`` contains their numbers."""
        first = self.load(rows[0])
        if len(rows) == 1:
            return first
        return _shuffled(self._builder, first, self.load(rows[1]), range(2 * LANES))

    def scatter(self, vector: Any, rows: Sequence[Any]) -> None:
        """Write a vector to rows of lanes. This is the inverse of ``gather``."""
        for i, row in enumerate(rows):
            part = range(i * LANES, (i + 1) * LANES)
            self.store(_shuffled(self._builder, vector, vector, part), row)


def vector_intrinsic(generate: Callable[..., None]) -> Callable[..., Any]:
    """Return an intrinsic for compiled code. Its instructions are emitted by ``generate``.

    ``generate`` is called with LLVM's instruction builder and the function's arguments: a
    ``LaneArray`` for each array, and LLVM's value for each number.
    """

    @wraps(generate)  # Numba reads the number of arguments from the signature of ``generate``.
    def typed(_: Any, *kinds: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            del signature
            arguments = (
                LaneArray(context, builder, kind, value) if isinstance(kind, types.Array) else value
                for kind, value in zip(kinds, values, strict=True)
            )
            generate(builder, *arguments)
            return context.get_dummy_value()

        return types.void(*kinds), code

    return extending.intrinsic(typed)


def _shuffled(builder: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes))
    return builder.shuffle_vector(first, second, mask)


def spread(builder: Any, number: Any) -> Any:
    """Return a vector that has the same float32 number in each of the eight lanes."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    lane = builder.insert_element(undefined, number, _INT32(0))
    return _shuffled(builder, lane, undefined, [0] * LANES)


@cache
def holds_two_tiles() -> bool:
    """Return whether this processor adds two tiles of samples as fast as a single tile.

    This requires vectors of 512 bits. On an Intel Xeon with AVX-512, two tiles together took 0.58
    times as long as one after the other. On AMD's Zen 3, whose vectors have 256 bits, they took
    longer.
    """
    is_native = config.CPU_NAME is None and config.CPU_FEATURES is None  # pyright: ignore[reportAttributeAccessIssue] -- set at run time
    return is_native and bool(binding.get_host_cpu_features().get("avx512f"))


@compiled
def tiles_of(n_samples):
    return (n_samples + LANES - 1) // LANES


@compiled
def flush(total, sums):
    """Add sums to a total, and set the sums to 0. Summing in stages reduces rounding errors."""
    total = total.reshape(-1)
    sums = sums.reshape(-1)
    for i in range(len(total)):
        total[i] += sums[i]
        sums[i] = 0


@vector_intrinsic
def _transpose(builder, x, row, matrix, first, column):
    """Write the transpose of an 8 x 8 part of a row-major matrix to 8 rows of lanes of ``x``."""
    rows = [matrix.strided((builder.add(first, INT64(i)), column)) for i in range(LANES)]
    for width in (1, 2, 4):  # Each step exchanges groups of ``width`` lanes between pairs of rows.
        low = [i if not i & width else i - width + LANES for i in range(LANES)]
        high = [i + width if not i & width else i + LANES for i in range(LANES)]
        for i in range(LANES):
            if not i & width:
                pair = rows[i], rows[i + width]
                rows[i], rows[i + width] = (_shuffled(builder, *pair, to) for to in (low, high))
    for i in range(LANES):
        x.store(rows[i], builder.add(row, INT64(i)))


@compiled
def fill_lanes(x, rows, at, start, stop):
    """Copy columns ``at`` to ``at + n - 1`` of ``rows`` to ``x``, with samples along the lanes.

    ``rows`` is C-contiguous and contains one row for each sample. ``x`` has shape (n_tiles, n * 8),
    with eight samples in a tile. Both arrays are float32. Columns outside of the range ``start`` to
    ``stop`` become zeros. ``at`` may be less than ``start``.
    """
    n = x.shape[1] // LANES
    if at < start or at + n > stop:
        x[:] = 0
    begin, end = max(at, start), min(at + n, stop)
    whole, tail = len(rows) // LANES, begin + (end - begin) // LANES * LANES
    for tile in range(whole):
        for i in range(begin, tail, LANES):
            _transpose(x[tile], i - at, rows, tile * LANES, i)  # pyright: ignore[reportCallIssue] -- numba gives the context
    for sample in range(len(rows)):
        tile, lane = sample // LANES, sample % LANES
        for i in range(tail if tile < whole else begin, end):
            x[tile, (i - at) * LANES + lane] = rows[sample, i]


@compiled
def fill_from_lanes(out, sums):
    """Copy the sums of each sample from its lane to its row of ``out``.

    ``sums`` has shape (n_tiles, m) with m at least proj_dim * 8. ``out`` has shape (n_samples,
    proj_dim).
    """
    n_samples, proj_dim = out.shape
    for sample in range(n_samples):
        tile, lane = sample // LANES, sample % LANES
        for column in range(proj_dim):
            out[sample, column] = sums[tile, column * LANES + lane]

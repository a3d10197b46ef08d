"""The sparse projection on a CPU: each coordinate is added to one column of each stripe."""

import numpy as np
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

_TAG = ProjectionKind.SJLT.tag
_BLOCK = 128  # coordinates put into lanes at once
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


@compiled
def sjlt_slice_cpu(rows, start, stop, first, key, stripes, out):
    """Write ``rows[:, start:stop] @ R[first:]`` less the factor sqrt(k/s) into ``out``.

    The arguments are those of ``rademacher_slice_cpu``, and s, a divisor of proj_dim.
    """
    n_samples = len(rows)
    proj_dim = out.shape[1]
    n_tiles = tiles_of(n_samples)
    width = np.uint64(proj_dim // stripes)
    sums = np.zeros((n_tiles, proj_dim * LANES), np.float32)
    total = np.zeros_like(sums)
    flush_blocks = max(_FLUSH * (proj_dim // stripes) // _BLOCK, 1)
    words = np.empty((stripes + 3) // 4 * 4, np.uint32)
    x = np.zeros((n_tiles, _BLOCK * LANES), np.float32)
    for block in range(first // _BLOCK, (first + stop - start - 1) // _BLOCK + 1):
        at = block * _BLOCK - first + start
        fill_lanes(x, rows, at, start, stop)
        for i in range(max(0, start - at), min(_BLOCK, stop - at)):
            fill_words(words, 0, block * _BLOCK + i, _TAG, key)
            for t in range(stripes):
                bucket = (np.uint64(words[t] & np.uint32(0x7FFFFFFF)) * width) >> np.uint64(31)
                column = np.int64(np.uint64(t) * width + bucket)
                bit = words[t] >> np.uint32(31)
                sign = np.float32(1.0) - np.float32(2.0) * np.float32(bit)
                for tile in range(n_tiles):
                    add_signed(sums[tile], column, x[tile], i, sign)
        if block % flush_blocks == flush_blocks - 1:
            flush(total, sums)
    flush(total, sums)
    fill_from_lanes(out, total)

"""Sparse projection (SJLT) without atomics: each sum has one thread that adds to it.

A block of threads takes one slice of coordinates, 8 rows, one stripe and a range of up to 1024 of
its columns, whose sums it keeps in shared memory. All threads bring in 128 coordinates and make
their words; then one thread a row walks them in order. It takes four at a time, so that the four
sums are fetched together: a sum that an earlier one of the four has changed is taken from there.
"""

from functools import cache
from typing import Any

from trak_core.projection.cuda.device_functions import (
    cuda,
    device_function,
    flip,
    float32,
    int32,
    int64,
    kernel,
    uint32,
    uint64,
    widen,
    widen_bfloat16,
    words_at,
)
from trak_core.projection.cuda.project_slices import Variant
from trak_core.spec import ProjectionKind, ProjectionSpec

_TAG = ProjectionKind.SJLT.tag
ALIGNMENT = 1
MOST_COLUMNS = 1024  # of one block of threads
THREADS = 128  # at least _ROWS; and as many coordinates at a time
_ROWS = 8


@device_function
def _word_of(words, i):
    """Return one of four words, chosen at run time."""
    if i == 0:
        return words[0]
    if i == 1:
        return words[1]
    if i == 2:
        return words[2]
    return words[3]


@cache
def sjlt_kernel(columns: int, bfloat16: bool, n_threads: int) -> Any:
    """Return the kernel for ranges of ``columns`` columns, a power of two."""
    read = widen_bfloat16 if bfloat16 else widen
    n_sums, n_tile = _ROWS * (columns + 1), _ROWS * (n_threads + 1)

    @kernel(n_threads)
    def _sjlt_kernel(values, sizes, partials, keys, stream, width, n_ranges):
        row_stride, origin, start, stop, n_rows, first_slice, slice_size, proj_dim = sizes
        sums = cuda.shared.array(n_sums, dtype=float32)  # [column][row], one more for the others'
        tile = cuda.shared.array(n_tile, dtype=float32)  # [row][coordinate], rows one longer
        places = cuda.shared.array(n_threads, dtype=uint32)
        thread = int32(cuda.threadIdx.x)
        stripe = int64(cuda.blockIdx.x) // n_ranges
        first_column = (int64(cuda.blockIdx.x) - stripe * n_ranges) * columns
        first_row = int64(cuda.blockIdx.z) * _ROWS
        slice_start = (first_slice + cuda.blockIdx.y) * slice_size
        begin, end = max(start, slice_start), min(stop, slice_start + slice_size)
        for i in range(thread, n_sums, n_threads):
            sums[i] = float32(0)
        for g in range(begin, end, n_threads):
            cuda.syncthreads()
            coordinate = int64(g) + thread
            words = words_at(stripe >> 2, coordinate, _TAG, stream, keys)
            word = uint32(_word_of(words, stripe & 3))
            bucket = int64((uint64(word & uint32(0x7FFFFFFF)) * uint64(width)) >> uint64(31))
            column = bucket - first_column
            if column < 0 or column >= columns:
                column = int64(columns)
            places[thread] = uint32(column * _ROWS)
            for row in range(_ROWS):
                x = float32(0)
                if first_row + row < n_rows and coordinate < end:
                    x = read(values[(first_row + row) * row_stride + coordinate - origin])
                tile[row * (n_threads + 1) + thread] = flip(x, word, 31)
            cuda.syncthreads()
            if thread < _ROWS:
                lane = uint32(thread)
                line = thread * (n_threads + 1)
                for i in range(0, n_threads, 4):
                    p0, p1 = uint32(places[i] + lane), uint32(places[i + 1] + lane)
                    p2, p3 = uint32(places[i + 2] + lane), uint32(places[i + 3] + lane)
                    s0, s1, s2, s3 = sums[p0], sums[p1], sums[p2], sums[p3]
                    s0 = float32(s0 + tile[line + i])
                    s1 = float32((s0 if p1 == p0 else s1) + tile[line + i + 1])
                    s2 = s1 if p2 == p1 else (s0 if p2 == p0 else s2)
                    s2 = float32(s2 + tile[line + i + 2])
                    s3 = s2 if p3 == p2 else (s1 if p3 == p1 else (s0 if p3 == p0 else s3))
                    s3 = float32(s3 + tile[line + i + 3])
                    sums[p0] = s0
                    sums[p1] = s1
                    sums[p2] = s2
                    sums[p3] = s3
        cuda.syncthreads()
        for row in range(_ROWS):
            if first_row + row < n_rows:
                line = (int64(cuda.blockIdx.y) * n_rows + first_row + row) * proj_dim
                for column in range(thread, columns, n_threads):
                    if first_column + column < width:
                        at = line + stripe * width + first_column + column
                        partials[at] = sums[column * _ROWS + row]

    return _sjlt_kernel


def variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the kernel; the factor sqrt(k/s) is left to what adds up the slices."""
    assert spec.stripes is not None
    width = spec.proj_dim // spec.stripes
    columns = min(MOST_COLUMNS, 1 << (width - 1).bit_length())
    n_ranges = -(-width // columns)
    grid = spec.stripes * n_ranges, -(-n_rows // _ROWS)
    return Variant(sjlt_kernel(columns, bfloat16, THREADS), grid, THREADS, (width, n_ranges))

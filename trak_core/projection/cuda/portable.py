"""Dense projection in plain float32 arithmetic, for any GPU and for the simulator.

A block of threads takes one slice of coordinates, ``samples`` rows and four columns a thread. It
brings 128 coordinates at a time into shared memory; each thread makes the entries of its columns in
registers and multiplies them with every row. Nothing depends on how the threads are grouped into
warps. Sums of 128 products are added up apart, which keeps rounding errors below 1e-6.
"""

from functools import cache
from typing import Any

from trak_core.projection.cuda.device_functions import (
    cuda,
    device_function,
    float32,
    int64,
    kernel,
    normal_of,
    sign_of,
    widen,
    widen_bfloat16,
    words_at,
)
from trak_core.projection.cuda.project_slices import Variant
from trak_core.spec import ProjectionKind, ProjectionSpec

_RADEMACHER = ProjectionKind.RADEMACHER.tag
_NORMAL = ProjectionKind.NORMAL.tag
ALIGNMENT = 1
THREADS = 128
SAMPLES = (8, 16)  # rows of a block of threads: the first that holds all, else the last
_BLOCK = 128


def _rademacher_block(samples):
    @device_function
    def add_block(tile, g, call, stream, keys, sums):
        """Add the products of coordinates g to g + 127, g a multiple of 128."""
        for t in range(4):
            words = words_at(call, 4 * (g >> 7) + t, _RADEMACHER, stream, keys)
            for bit in range(32):
                half = bit & 15
                place = (16 * (half >> 1) + 8 * (half & 1) + 2 * t + (bit >> 4)) * samples
                s0, s1 = sign_of(words[0], bit), sign_of(words[1], bit)
                s2, s3 = sign_of(words[2], bit), sign_of(words[3], bit)
                for b in range(samples):
                    x = tile[place + b]
                    sums[4 * b] += s0 * x
                    sums[4 * b + 1] += s1 * x
                    sums[4 * b + 2] += s2 * x
                    sums[4 * b + 3] += s3 * x

    return add_block


def _normal_block(samples):
    @device_function
    def add_block(tile, g, call, stream, keys, sums):
        """Add the products of coordinates g to g + 127."""
        for i in range(_BLOCK):
            words = words_at(call, g + i, _NORMAL, stream, keys)
            r0, r1 = normal_of(words[0]), normal_of(words[1])
            r2, r3 = normal_of(words[2]), normal_of(words[3])
            for b in range(samples):
                x = tile[i * samples + b]
                sums[4 * b] += r0 * x
                sums[4 * b + 1] += r1 * x
                sums[4 * b + 2] += r2 * x
                sums[4 * b + 3] += r3 * x

    return add_block


@cache
def portable_kernel(kind: ProjectionKind, bfloat16: bool, samples: int, n_threads: int) -> Any:
    """Return the kernel of ``rademacher`` or ``normal`` for blocks of ``samples`` rows."""
    add_block = (_normal_block if kind is ProjectionKind.NORMAL else _rademacher_block)(samples)
    read = widen_bfloat16 if bfloat16 else widen
    n_tile, n_sums = _BLOCK * samples, 4 * samples

    @kernel(n_threads)
    def _portable_kernel(values, sizes, partials, keys, stream):
        row_stride, origin, start, stop, n_rows, first_slice, slice_size, proj_dim = sizes
        tile = cuda.shared.array(n_tile, dtype=float32)  # [coordinate][row]
        sums = cuda.local.array(n_sums, dtype=float32)
        totals = cuda.local.array(n_sums, dtype=float32)
        for i in range(n_sums):
            totals[i] = float32(0)
        call = int64(cuda.blockIdx.x) * n_threads + cuda.threadIdx.x
        first_row = int64(cuda.blockIdx.z) * samples
        slice_start = (first_slice + cuda.blockIdx.y) * slice_size
        begin, end = max(start, slice_start), min(stop, slice_start + slice_size)
        for g in range(begin & ~int64(_BLOCK - 1), end, _BLOCK):
            cuda.syncthreads()
            for e in range(cuda.threadIdx.x, n_tile, n_threads):
                row, i = e >> 7, e & (_BLOCK - 1)
                x = float32(0)
                if first_row + row < n_rows and begin <= g + i and g + i < end:
                    x = read(values[(first_row + row) * row_stride + g + i - origin])
                tile[i * samples + row] = x
            cuda.syncthreads()
            for i in range(n_sums):
                sums[i] = float32(0)
            add_block(tile, g, call, stream, keys, sums)
            for i in range(n_sums):
                totals[i] += sums[i]
        for b in range(samples):
            row = first_row + b
            if row < n_rows:
                line = (int64(cuda.blockIdx.y) * n_rows + row) * proj_dim
                for i in range(4):
                    if 4 * call + i < proj_dim:
                        partials[line + 4 * call + i] = totals[4 * b + i]

    return _portable_kernel


def variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the kernel of ``rademacher`` or ``normal`` that fits the number of rows."""
    samples = next((samples for samples in SAMPLES if n_rows <= samples), SAMPLES[-1])
    grid = -(-spec.proj_dim // (4 * THREADS)), -(-n_rows // samples)
    return Variant(portable_kernel(spec.kind, bfloat16, samples, THREADS), grid, THREADS)

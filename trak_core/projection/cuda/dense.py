"""Project on a GPU with dense matrices, ``rademacher`` and ``normal``.

The *portable kernel* uses plain float32 arithmetic and runs on any GPU and in numba's simulator. A
block of threads processes one slice of coordinates of 8 or 16 gradients. Each thread processes four
columns of R. The block loads 128 coordinates at a time into shared memory. Each thread computes the
entries of R for its columns in registers and multiplies every row by them. The result does not
depend on the size of warps. Sums of 128 products are computed first and then added, which keeps
rounding errors below 1e-6.

The *tensor-core kernel* for ``rademacher`` uses mma.sync (compute capability 8.0 and later). R is
never in memory. A warp computes the operands of m16n8k16 products from Philox words. An operand
register holds two 16-bit entries, +1 or -1, and is computed by one shift and one logical operation.
One Philox call returns all signs that a thread needs for 4 columns and 128 coordinates, in the
order of the operands. Gradients are copied to shared memory in stages of 256 coordinates, and each
stage is copied while the previous one is processed.

The products are exact. Tensor cores add them in float32, rounding toward zero. After every 4096
coordinates, the sums are added to totals in registers, rounding to nearest.

A float32 gradient is split into two rows of bfloat16 numbers, its high and its low part. The
entries of R are exact in bfloat16, so the relative error of a gradient entry is at most 2^-18.

Source: NVIDIA, "Parallel Thread Execution ISA", "Matrix fragments for mma.m16n8k16".
"""

from functools import cache
from typing import Any

from trak_core.projection.cuda.device_functions import (
    SIMULATED,
    cuda,
    device_function,
    float32,
    int32,
    int64,
    kernel,
    normal_of,
    philox,
    sign_of,
    uint16,
    uint32,
    uint64,
    unrolled,
    widen,
    widen_bfloat16,
    words_at,
)
from trak_core.projection.cuda.variants import Tile
from trak_core.settings import ProjectionKind

if SIMULATED:
    _ptx = None  # numba does not simulate tensor cores, so tests replace this module
else:
    from trak_core.projection.cuda import inline_ptx as _ptx
ptx: Any = _ptx

_RADEMACHER = ProjectionKind.RADEMACHER.tag
_NORMAL = ProjectionKind.NORMAL.tag
_BLOCK = 128
_STAGE = 256  # coordinates in shared memory at a time, for the tensor cores


def _rademacher_block(samples):
    @device_function
    def add_block(tile, g, call, stream, keys, sums):
        """Add the products of gradients and R for coordinates g to g + 127 to a thread's sums.

        ``g`` is a multiple of 128.
        """
        for t in range(4):
            words = words_at(call, 4 * (g >> 7) + t, _RADEMACHER, stream, keys)
            for bit in range(32):
                half = bit & 15
                position = (16 * (half >> 1) + 8 * (half & 1) + 2 * t + (bit >> 4)) * samples
                s0, s1 = sign_of(words[0], bit), sign_of(words[1], bit)
                s2, s3 = sign_of(words[2], bit), sign_of(words[3], bit)
                for b in range(samples):
                    x = tile[position + b]
                    sums[4 * b] += s0 * x
                    sums[4 * b + 1] += s1 * x
                    sums[4 * b + 2] += s2 * x
                    sums[4 * b + 3] += s3 * x

    return add_block


def _normal_block(samples):
    @device_function
    def add_block(tile, g, call, stream, keys, sums):
        """Add the products of gradients and R for coordinates g to g + 127 to a thread's sums."""
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
    """Return the portable kernel, in which a block of threads processes ``samples`` gradients."""
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


@cache
def tensor_core_kernel(tile: Tile, bfloat16: bool, flush: int) -> Any:
    """Return the tensor-core kernel. Gradients are float16, or bfloat16 if ``bfloat16`` is true.

    ``tile`` is the size of a thread block's result. After every ``flush`` coordinates, sums are
    added to totals, which reduces rounding errors. ``flush`` is a power of two, at least 256.
    """
    mma = ptx.mma_bfloat16 if bfloat16 else ptx.mma_float16
    ones = uint32(0x3F803F80 if bfloat16 else 0x3C003C00)
    sign = uint32(0x80008000)
    sample_tiles, column_tiles = tile.sample_tiles, tile.column_tiles
    rows, n_threads = 8 * sample_tiles, 32 * tile.n_warps
    n_warps, warp_columns = tile.n_warps, 16 * column_tiles
    # With 16 bytes of padding, the parts of 8 rows that are loaded together are in different banks.
    row_bytes = 2 * _STAGE + 16
    stage_bytes = rows * row_bytes
    n_shared = stage_bytes + 8  # 16-bit numbers in two stages, and 16 bytes for alignment
    per_row = _STAGE // 8
    n_copies = rows * per_row // n_threads
    n_sums = 4 * column_tiles * sample_tiles
    n_words, n_gradients = 2 * column_tiles, 4 * sample_tiles

    # Arrays of sums, words and gradients stay in registers only if their indices are constants.
    # Therefore, the loops over them are replaced by unrolled functions.

    @unrolled(n_copies)
    def copy_stage(i, shared, memory, row_stride, origin, first_row, n_rows, begin, end, g):
        """Start to copy gradients at coordinates g to g + 255. Outside of the slice, copy 0."""
        e = uint32(cuda.threadIdx.x) + uint32(i * n_threads)
        row, part = e // uint32(per_row), e & uint32(per_row - 1)
        first = g + int64(part) * 8
        n_bytes = uint32(0)
        source = memory
        if first_row + int64(row) < n_rows and begin <= first and first < end:
            n_bytes = uint32(2 * min(int64(8), end - first))
            source = memory + uint64(2 * ((first_row + int64(row)) * row_stride + first - origin))
        to = uint32(shared + uint32(row * uint32(row_bytes)) + uint32(part * uint32(16)))
        ptx.copy_async(to, source, n_bytes)

    @unrolled(n_sums)
    def clear(i, numbers):
        numbers[i] = float32(0)

    @unrolled(n_sums)
    def move_on(i, sums, totals):
        totals[i] += sums[i]
        sums[i] = float32(0)

    @unrolled(column_tiles // 2)
    def make_words(h, call, low, high, stream, keys, words):
        w = philox(uint32(call + uint32(8 * h)), low, high, stream, keys)
        words[4 * h] = w[0]
        words[4 * h + 1] = w[1]
        words[4 * h + 2] = w[2]
        words[4 * h + 3] = w[3]

    @unrolled(sample_tiles)
    def load(n, address, gradients):
        x = ptx.load_matrices(uint32(address + uint32(n * 8 * row_bytes)))
        gradients[4 * n] = x[0]
        gradients[4 * n + 1] = x[1]
        gradients[4 * n + 2] = x[2]
        gradients[4 * n + 3] = x[3]

    @unrolled(sample_tiles)
    def add_product(n, m, s, a0, a1, a2, a3, gradients, sums):
        i = 4 * (m * sample_tiles + n)
        b0, b1 = gradients[4 * n + 2 * s], gradients[4 * n + 2 * s + 1]
        d = mma(a0, a1, a2, a3, b0, b1, sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
        sums[i] = d[0]
        sums[i + 1] = d[1]
        sums[i + 2] = d[2]
        sums[i + 3] = d[3]

    @unrolled(2 * column_tiles)
    def add_step(step, quarter, words, gradients, sums):
        """Add the products of gradients and R for 16 columns and 16 coordinates."""
        m, s = step >> 1, step & 1
        bit = 4 * quarter + 2 * s
        upper, lower = words[2 * m], words[2 * m + 1]
        a0 = ptx.and_xor(uint32(upper << uint32(15 - bit)), sign, ones)
        a1 = ptx.and_xor(uint32(lower << uint32(15 - bit)), sign, ones)
        a2 = ptx.and_xor(uint32(upper << uint32(14 - bit)), sign, ones)
        a3 = ptx.and_xor(uint32(lower << uint32(14 - bit)), sign, ones)
        add_product(m, s, a0, a1, a2, a3, gradients, sums)

    @unrolled(4)
    def add_quarter(quarter, address, words, gradients, sums):
        """Add the products of gradients and R for a quarter of a block of 128 coordinates."""
        load(uint32(address + uint32(quarter * 64)), gradients)
        add_step(quarter, words, gradients, sums)

    @unrolled(n_sums)
    def write(i, first_row, n_rows, first_column, line, proj_dim, totals, sums, partials):
        """Write sum i of a thread. Its first sum is at ``first_row`` and ``first_column``."""
        m, n = (i >> 2) // sample_tiles, (i >> 2) % sample_tiles
        row = first_row + 8 * n + (i & 1)
        j = first_column + 32 * (m >> 1) + 2 * (m & 1) + (i >> 1 & 1)
        if row < n_rows and j < proj_dim:
            partials[line + row * proj_dim + j] = totals[i] + sums[i]

    @kernel(n_threads, tile.n_blocks)
    def _tensor_core_kernel(values, sizes, partials, keys, stream):
        row_stride, origin, start, stop, n_rows, first_slice, slice_size, proj_dim = sizes
        memory = ptx.global_address(values)
        array = cuda.shared.array(n_shared, dtype=uint16)
        shared = uint32(uint32(ptx.shared_address(array) + uint32(15)) & uint32(0xFFFFFFF0))
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, member = lane >> 2, lane & 3
        first_row = int64(cuda.blockIdx.z) * rows
        first_column = (int64(cuda.blockIdx.x) * n_warps + warp) * warp_columns
        slice_start = (first_slice + cuda.blockIdx.y) * slice_size
        begin, end = max(start, slice_start), min(stop, slice_start + slice_size)

        sums = cuda.local.array(n_sums, dtype=float32)
        totals = cuda.local.array(n_sums, dtype=float32)
        words = cuda.local.array(n_words, dtype=uint32)
        gradients = cuda.local.array(n_gradients, dtype=uint32)
        clear(sums)
        clear(totals)
        call = uint32((first_column >> 2) + group)
        matrix_row = uint32((lane & 7) * row_bytes + (lane >> 3) * 16)

        g = begin & ~int64(_STAGE - 1)
        n_stages = int32((end - g + _STAGE - 1) >> 8) if end > begin else int32(0)
        if n_stages > 0:
            copy_stage(shared, memory, row_stride, origin, first_row, n_rows, begin, end, g)
        for stage in range(n_stages):
            half = uint32(stage & 1)
            ptx.wait_for_copies()
            cuda.syncthreads()
            if stage + 1 < n_stages:
                other = uint32(shared + uint32((half ^ uint32(1)) * uint32(stage_bytes)))
                copy_stage(
                    other, memory, row_stride, origin, first_row, n_rows, begin, end, g + _STAGE
                )
            if first_column < proj_dim:
                for block in range(_STAGE // 128):
                    q = uint64(4 * ((g >> 7) + block) + member)
                    low = uint32(q & uint64(0xFFFFFFFF))
                    high = uint32(uint32(q >> uint64(32)) | uint32(_RADEMACHER << 24))
                    # Without the copy, the compiler would compute the first Philox products once
                    # for all blocks, and keep them in registers that are needed for sums.
                    make_words(ptx.opaque_copy(call), low, high, stream, keys, words)
                    address = uint32(shared + uint32(half * uint32(stage_bytes)) + matrix_row)
                    address = uint32(address + uint32(block * 256))
                    add_quarter(address, words, gradients, sums)
            g += _STAGE
            if g & (flush - 1) == 0:
                move_on(sums, totals)

        first_column += 4 * group
        first_row += 2 * member
        line = int64(cuda.blockIdx.y) * n_rows * proj_dim
        write(first_row, n_rows, first_column, line, proj_dim, totals, sums, partials)

    return _tensor_core_kernel

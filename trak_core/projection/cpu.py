"""The projection on a CPU: R is made tile by tile, each tile used in one matrix product."""

import numpy as np
from numba import config, njit, prange, set_num_threads

from trak_core.projection.philox import philox4x32

_BLOCK = 128  # coordinates that one line of Philox calls serves
_TILE_BYTES = 8 * 2**20


@njit(cache=True, parallel=True)
def rademacher_tile_cpu(tile, first, seed_low, seed_high, stream):
    """Write rows ``first, first + 1, ...`` of the unscaled rademacher matrix into ``tile``.

    The bit layout is that of ``reference.py``. Blocks of 128 coordinates are independent, so the
    number of threads changes nothing.
    """
    n_rows, proj_dim = tile.shape
    n_calls = (proj_dim + 3) // 4
    first_block = first // _BLOCK
    n_blocks = (first + n_rows - 1) // _BLOCK - first_block + 1
    for block in prange(n_blocks):
        words = np.empty((4, 4 * n_calls), np.uint32)
        for t in range(4):
            q = np.uint64(4 * (first_block + block) + t)
            low, high = np.uint32(q & np.uint64(0xFFFFFFFF)), np.uint32(q >> np.uint64(32))
            for call in range(n_calls):
                w0, w1, w2, w3 = philox4x32(np.uint32(call), low, high, stream, seed_low, seed_high)
                words[t, 4 * call] = w0
                words[t, 4 * call + 1] = w1
                words[t, 4 * call + 2] = w2
                words[t, 4 * call + 3] = w3
        start = (first_block + block) * _BLOCK
        for g in range(max(first, start), min(first + n_rows, start + _BLOCK)):
            line = words[(g >> 1) & 3]
            bit = np.uint32(2 * ((g >> 4) & 7) + ((g >> 3) & 1) + 16 * (g & 1))
            row = tile[g - first]
            for j in range(proj_dim):
                row[j] = np.float32(1.0) - np.float32((line[j] >> bit) & np.uint32(1)) * np.float32(
                    2.0
                )


def project_rademacher_cpu(
    gradients: np.ndarray, seed: int, stream: int, offset: int, threads: int, out: np.ndarray
) -> None:
    """Add ``gradients @ R[offset : offset + n]`` to ``out``.

    Args:
        gradients: Shape (n_samples, n), float32.
        seed: Unsigned 64 bit.
        stream: Unsigned 32 bit.
        offset: Coordinate of the first column of ``gradients``.
        threads: How many threads make the tiles (the matrix product has BLAS's own setting).
        out: Shape (n_samples, proj_dim), float32; added to.
    """
    most = config.NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]
    set_num_threads(min(threads, most))
    n_params, proj_dim = gradients.shape[1], out.shape[1]
    # Whole blocks of coordinates, on the absolute grid: where a chunk begins must not decide
    # which words are drawn twice.
    n_rows = max(_BLOCK, _TILE_BYTES // (4 * proj_dim) // _BLOCK * _BLOCK)
    tile = np.empty((min(n_rows, n_params), proj_dim), np.float32)
    start = 0
    while start < n_params:
        stop = min(n_params, start + n_rows - (offset + start) % _BLOCK)
        rows = tile[: stop - start]
        rademacher_tile_cpu(
            rows,
            offset + start,
            np.uint32(seed & 0xFFFFFFFF),
            np.uint32(seed >> 32),
            np.uint32(stream),
        )
        out += gradients[:, start:stop] @ rows
        start = stop

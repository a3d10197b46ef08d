"""Add up the slices' sums on a GPU."""

from functools import cache
from typing import Any

from trak_core.projection.cuda.device_functions import cuda, float32, int64, kernel


@cache
def add_partials_kernel(n_threads: int) -> Any:
    """Return the kernel that adds up slices, with blocks of so many threads."""

    @kernel(n_threads)
    def _add_partials_kernel(
        partials, n_slices, n_planes, n_rows, proj_dim, out, row_stride, column_stride
    ):
        """Add the slices' sums to ``out``, slice after slice; a thread owns one entry."""
        n_entries = int64(n_rows) * proj_dim
        step = int64(cuda.gridDim.x) * n_threads
        for entry in range(int64(cuda.blockIdx.x) * n_threads + cuda.threadIdx.x, n_entries, step):
            row = entry // proj_dim
            place = row * row_stride + (entry - row * proj_dim) * column_stride
            total = out[place]
            for s in range(n_slices):
                sums = float32(0)
                for plane in range(n_planes):
                    sums += partials[(s * n_planes + plane) * n_entries + entry]
                total += sums
            out[place] = total

    return _add_partials_kernel

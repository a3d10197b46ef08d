"""Add the projections of slices of coordinates on a GPU."""

from functools import cache
from typing import Any

from trak_core.projection.cuda.device_functions import cuda, float32, int64, kernel


@cache
def add_partials_kernel(n_threads: int) -> Any:
    """Return the kernel that adds the projections of slices of coordinates to the result."""

    @kernel(n_threads)
    def _add_partials_kernel(
        partials, n_slices, n_planes, n_rows, proj_dim, out, row_stride, column_stride
    ):
        """Add the sums of all slices to ``out``, in order, with one thread for each entry."""
        n_entries = int64(n_rows) * proj_dim
        step = int64(cuda.gridDim.x) * n_threads
        for entry in range(int64(cuda.blockIdx.x) * n_threads + cuda.threadIdx.x, n_entries, step):
            row = entry // proj_dim
            position = row * row_stride + (entry - row * proj_dim) * column_stride
            total = out[position]
            for s in range(n_slices):
                sums = float32(0)
                for plane in range(n_planes):
                    sums += partials[(s * n_planes + plane) * n_entries + entry]
                total += sums
            out[position] = total

    return _add_partials_kernel

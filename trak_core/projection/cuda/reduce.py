"""Adding the slices' sums to the result, always in the same order."""

import torch

from trak_core.projection.cuda.device import cuda, float32, int64, kernel
from trak_core.projection.cuda.launch import flat, launch

_THREADS = 256


@kernel(_THREADS)
def _add_partials_kernel(
    partials, n_slices, n_planes, n_rows, proj_dim, out, row_stride, column_stride
):
    """Add the slices' sums to ``out``, slice after slice; a thread owns one entry."""
    n_entries = int64(n_rows) * proj_dim
    step = int64(cuda.gridDim.x) * _THREADS
    for entry in range(int64(cuda.blockIdx.x) * _THREADS + cuda.threadIdx.x, n_entries, step):
        row = entry // proj_dim
        place = row * row_stride + (entry - row * proj_dim) * column_stride
        total = out[place]
        for s in range(n_slices):
            sums = float32(0)
            for plane in range(n_planes):
                sums += partials[(s * n_planes + plane) * n_entries + entry]
            total += sums
        out[place] = total


def add_partials(partials: torch.Tensor, n_planes: int, out: torch.Tensor) -> None:
    """Add the sums of all slices to ``out``, in the order of the slices.

    Args:
        partials: Shape (n_slices, n_planes * n_rows, proj_dim), float32; planes of one matrix are
            added together first.
        n_planes: How many planes each row has.
        out: Shape (n_rows, proj_dim), float32; may be strided.
    """
    n_rows, proj_dim = out.shape
    n_blocks = min(4096, -(-n_rows * proj_dim // _THREADS))
    launch(
        _add_partials_kernel,
        (n_blocks,),
        _THREADS,
        partials.view(-1),
        partials.shape[0],
        n_planes,
        n_rows,
        proj_dim,
        flat(out),
        out.stride(0),
        out.stride(1),
    )

"""Start kernels on PyTorch's memory and stream, and add their slices' sums in a fixed order."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trak_core.projection.cuda.device import SIMULATED, cuda, float32, int64, kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive slices of coordinates of some rows, and where their numbers are.

    The number of row b and coordinate g is ``values[b * row_stride + g - origin]``. Slice s holds
    the coordinates from s * slice_size on; the kernel takes those from ``start`` to ``stop``. Its
    sums go to ``partials[s - first_slice]``.

    Attributes:
        values: One dimension, bfloat16 as int16.
        row_stride: Elements from one row to the next.
        origin: Coordinate of ``values[0]``.
        start: First coordinate to take.
        stop: One past the last coordinate to take.
        n_rows: How many rows there are.
        first_slice: Number of the first slice.
        slice_size: Coordinates of a slice.
        partials: Shape (n_slices, n_rows, proj_dim), float32, overwritten.
    """

    values: torch.Tensor
    row_stride: int
    origin: int
    start: int
    stop: int
    n_rows: int
    first_slice: int
    slice_size: int
    partials: torch.Tensor

    def arguments(self) -> tuple[Any, ...]:
        """Return the first arguments of every kernel."""
        return (
            self.values,
            self.row_stride,
            self.origin,
            self.start,
            self.stop,
            self.n_rows,
            self.first_slice,
            self.slice_size,
            self.partials.view(-1),
            self.partials.shape[2],
        )


def flat(matrix: torch.Tensor) -> torch.Tensor:
    """Return a view of all memory a matrix spans, in one dimension, bfloat16 as int16.

    One layout for every kernel: what is compiled depends on the dtype alone.
    """
    matrix = matrix.detach()
    spanned = 1 + sum((n - 1) * step for n, step in zip(matrix.shape, matrix.stride(), strict=True))
    memory = matrix.as_strided((spanned,), (1,))
    return memory.view(torch.int16) if memory.dtype is torch.bfloat16 else memory


def launch(kernel: Any, grid: Sequence[int], n_threads: int, *arguments: Any) -> None:
    """Start a kernel on PyTorch's current stream; tensors are handed over without a copy."""
    if SIMULATED:
        arguments = tuple(a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments)
        kernel[tuple(grid), n_threads](*arguments)
        return
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grid size")  # small inputs make small grids
        kernel[tuple(grid), n_threads, stream](*arguments)


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

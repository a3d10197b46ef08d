"""Choose a variant of a kernel and its launch sizes for a projection and a number of rows.

This module does not import numba, because a job whose kernels are cached needs no compiler.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from trak_core.settings import ProjectionSpec


class Kernel(NamedTuple):
    """The function that returns a kernel, and its arguments, which together identify the kernel."""

    factory: str  # the module in this folder and the function, such as ``dense.portable_kernel``
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel, and the numbers of thread blocks and threads with which it is launched."""

    kernel: Kernel
    grid: tuple[int, int]  # number of thread blocks in x and in z, for each slice of coordinates
    n_threads: int  # number of threads in a block


THREADS = 128  # number of threads in a block of the portable kernel
# The numbers of rows that a block of the portable kernel can process. The first number that is
# large enough for all rows is used, or the last number if none is.
SAMPLES = (8, 16)


def portable_variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the portable kernel for ``spec``, and its launch sizes for a number of rows."""
    samples = next((samples for samples in SAMPLES if n_rows <= samples), SAMPLES[-1])
    grid = -(-spec.proj_dim // (4 * THREADS)), -(-n_rows // samples)
    kernel = Kernel("dense.portable_kernel", (spec.kind, bfloat16, samples, THREADS))
    return Variant(kernel, grid, THREADS)


ALIGNMENT = 8  # coordinates in an asynchronous copy of 16 bytes by the tensor-core kernel
FLUSH = 4096  # coordinates that tensor cores sum before their sums are added to totals


@dataclass(frozen=True, slots=True)
class Tile:
    """The size of a thread block's result in the tensor-core kernel."""

    sample_tiles: int  # tiles of 8 rows
    column_tiles: int  # tiles of 16 columns for each warp, an even number
    n_warps: int  # warps, each of which processes other columns
    n_blocks: int  # number of thread blocks that should fit on a multiprocessor

    @property
    def n_columns(self) -> int:
        return 16 * self.column_tiles * self.n_warps


# The first tile that is large enough for all rows is used, or the last tile if none is. On an H200,
# blocks of 4 warps were the fastest, because a barrier in a larger block stops more warps.
TILES = (Tile(1, 4, 4, 6), Tile(2, 4, 4, 4), Tile(4, 4, 4, 2))


def tensor_core_variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the tensor-core kernel, and its launch sizes for a number of rows.

    Rows have dtype float16, or bfloat16 that is passed as int16. They must be aligned to
    ``ALIGNMENT`` coordinates.
    """
    tile = next((tile for tile in TILES if n_rows <= 8 * tile.sample_tiles), TILES[-1])
    grid = -(-spec.proj_dim // tile.n_columns), -(-n_rows // (8 * tile.sample_tiles))
    kernel = Kernel("dense.tensor_core_kernel", (tile, bfloat16, FLUSH))
    return Variant(kernel, grid, 32 * tile.n_warps)


HADAMARD_INNER = 8192  # the longest transform of a thread block, with 34 KiB of shared memory
HADAMARD_THREADS = 128  # minimum number of threads in a block, which may process several rows
# If proj_dim is less than this number, sums are added to totals after this number of blocks of
# coordinates.
HADAMARD_FLUSH = 256


def held_bits(inner: int) -> int:
    """Return the b for which a thread holds 2**b of the ``inner`` numbers of a transform."""
    return min(4, inner.bit_length() - 1)


def hadamard_variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the Hadamard kernel and its launch sizes for a number of rows.

    ``spec.proj_dim`` must divide the length of a slice.
    """
    inner = min(spec.proj_dim, HADAMARD_INNER)
    n_threads = inner >> held_bits(inner)
    n_rows_held = max(1, HADAMARD_THREADS // n_threads)
    grid = -(-n_rows // n_rows_held), spec.proj_dim // inner
    arguments = spec.proj_dim, inner, n_rows_held, bfloat16, HADAMARD_FLUSH
    return Variant(Kernel("hadamard.hadamard_kernel", arguments), grid, n_threads * n_rows_held)

"""Choose a kernel's variant, and how it is started, by the projection and the number of rows.

Nothing here imports numba: a job whose kernels are compiled already needs no compiler.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from trak_core.spec import ProjectionSpec


class Kernel(NamedTuple):
    """A kernel by the function that makes it, such as ``dense.portable_kernel``.

    Attributes:
        factory: Module in this folder, and function.
        arguments: What the function is called with.
    """

    factory: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel, with the arguments that ``project_slices`` describes, and how it is started.

    The grid has the blocks of threads for one slice, in x and in z.
    """

    kernel: Kernel
    grid: tuple[int, int]
    n_threads: int


THREADS = 128  # of a block of the portable kernel
SAMPLES = (8, 16)  # rows of a block of threads: the first that holds all, else the last


def portable_variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the kernel of ``rademacher`` or ``normal`` that fits the number of rows."""
    samples = next((samples for samples in SAMPLES if n_rows <= samples), SAMPLES[-1])
    grid = -(-spec.proj_dim // (4 * THREADS)), -(-n_rows // samples)
    kernel = Kernel("dense.portable_kernel", (spec.kind, bfloat16, samples, THREADS))
    return Variant(kernel, grid, THREADS)


ALIGNMENT = 8  # coordinates: 16 bytes, what one asynchronous copy to a tensor-core kernel moves
FLUSH = 4096  # coordinates that the tensor cores add up


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block of threads holds: tiles of 8 rows, and warps side by side over columns.

    A warp holds an even number of tiles of 16 columns, a multiprocessor ``n_blocks`` of threads.
    """

    sample_tiles: int
    column_tiles: int
    n_warps: int
    n_blocks: int

    @property
    def n_columns(self) -> int:
        """Columns of a block of threads."""
        return 16 * self.column_tiles * self.n_warps


# By rows: the first that holds all, else the last.
TILES = (Tile(1, 8, 4, 4), Tile(2, 4, 8, 2), Tile(4, 4, 8, 1))


def tensor_core_variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the kernel that fits the number of rows.

    What it reads must be aligned to ``ALIGNMENT`` coordinates: bfloat16 (as int16), else float16.
    """
    tile = next((tile for tile in TILES if n_rows <= 8 * tile.sample_tiles), TILES[-1])
    grid = -(-spec.proj_dim // tile.n_columns), -(-n_rows // (8 * tile.sample_tiles))
    kernel = Kernel("dense.tensor_core_kernel", (tile, bfloat16, FLUSH))
    return Variant(kernel, grid, 32 * tile.n_warps)


HADAMARD_INNER = 8192  # the longest transform of one block of threads: 34 KiB of shared memory
HADAMARD_THREADS = 128  # of a block, at least where a transform is shorter than 16 times this
# Blocks after which sums go into totals, if a block is shorter: a slice holds more.
HADAMARD_FLUSH = 256


def held_bits(inner: int) -> int:
    """Return the bits of an index that one thread of a transform holds."""
    return min(4, inner.bit_length() - 1)


def hadamard_variant(spec: ProjectionSpec, bfloat16: bool, n_rows: int) -> Variant:
    """Return the kernel of the spec's proj_dim; a slice is a whole number of blocks of it."""
    inner = min(spec.proj_dim, HADAMARD_INNER)
    n_threads = inner >> held_bits(inner)
    n_rows_held = max(1, HADAMARD_THREADS // n_threads)
    grid = -(-n_rows // n_rows_held), spec.proj_dim // inner
    arguments = spec.proj_dim, inner, n_rows_held, bfloat16, HADAMARD_FLUSH
    return Variant(Kernel("sketches.hadamard_kernel", arguments), grid, n_threads * n_rows_held)

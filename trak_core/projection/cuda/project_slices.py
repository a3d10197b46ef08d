"""Project on a GPU in fixed slices of coordinates, with a memory limit for each launch.

Slice s contains the coordinates s * SLICE to (s + 1) * SLICE - 1, for any offset of a call. The
sums of each slice are computed separately and added to the result in the order of the slices.
Therefore the result does not depend on the number of slices in a launch or on the blocks of the
gradient.

Every kernel has the arguments ``values, sizes, partials, keys, stream``:

- ``values``: the gradients as a flat array, with bfloat16 viewed as int16. The entry for row b and
  coordinate g is ``values[b * row_stride + g - origin]``.
- ``sizes``: row_stride, origin, start, stop, n_rows, first_slice, slice_size and proj_dim. Thread
  blocks with blockIdx.y = i process those coordinates of slice first_slice + i that are at least
  ``start`` and less than ``stop``.
- ``partials``: the result, float32, a flat array of shape (n_slices, n_rows, proj_dim). The sums of
  slice first_slice + i are written to ``partials[i]``.
- ``keys``, ``stream``: the ``round_keys`` of the seed, and the stream of the spec.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from trak_core.projection.cuda.compiled import launch
from trak_core.projection.cuda.variants import Kernel, Variant
from trak_core.settings import ProjectionSpec

SLICE = 65536
BUDGET_BYTES = 224 * 2**20  # memory limit for copied gradients and the sums of slices together
_FILL = 512  # number of thread blocks that occupy a large GPU
_MOST_SLICES = 32768
_STEP = 256  # Copied coordinates start and stop at multiples of this divisor of SLICE.
_THREADS = 256  # threads of a block that adds the sums of slices
_ADD_PARTIALS = Kernel("partials.add_partials_kernel", (_THREADS,))
_ARRAYS = {torch.float32: "float32[:]", torch.float16: "float16[:]", torch.int16: "int16[:]"}
# Types of a kernel's arguments after ``values``.
TYPES = "int64 x 8", "float32[:]", "uint32 x 20", "uint32"
_ADD_TYPES = "float32[:]", *["int64"] * 4, "float32[:]", "int64", "int64"
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # added to Philox's keys after each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The kernel for gradients of a dtype on a device, and the form in which it reads them."""

    name: str
    variant: Callable[[int], Variant]  # returns the kernel for a number of rows
    dtype: torch.dtype
    n_planes: int  # 2 if float32 gradients are split into high and low parts in bfloat16, else 1
    # A kernel can read a block without a copy if the block's first coordinate and row stride are
    # multiples of this number.
    alignment: int


@cache
def round_keys(seed: int) -> tuple[int, ...]:
    """Return the keys of Philox's ten rounds, two for each round, as 20 numbers."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    keys = [((low + i * _W0) & 0xFFFFFFFF, (high + i * _W1) & 0xFFFFFFFF) for i in range(10)]
    return tuple(key for pair in keys for key in pair)


def flat(matrix: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of the memory that a matrix spans.

    Views of all matrices have the same layout, so that a kernel is compiled only once for each
    dtype. bfloat16 is viewed as int16, because numba has no bfloat16.
    """
    spanned = 1 + sum((n - 1) * step for n, step in zip(matrix.shape, matrix.stride(), strict=True))
    memory = matrix.as_strided((spanned,), (1,))
    return memory.view(torch.int16) if memory.dtype is torch.bfloat16 else memory


def _add_partials(partials: torch.Tensor, n_slices: int, n_planes: int, out: torch.Tensor) -> None:
    """Add the sums of all slices to ``out``, (n_rows, proj_dim), in the order of the slices.

    ``partials`` has shape (n_slices, n_planes * n_rows, proj_dim), float32, as a flat array. If
    gradients were split into two planes, their high and low parts, the sums of a slice's planes are
    added first.
    """
    n_rows, proj_dim = out.shape
    n_blocks = min(4096, -(-n_rows * proj_dim // _THREADS))
    sums = partials, n_slices, n_planes, n_rows, proj_dim
    target = flat(out), out.stride(0), out.stride(1)
    launch(_ADD_PARTIALS, _ADD_TYPES, (n_blocks,), _THREADS, *sums, *target)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slices that one launch of a kernel processes."""

    first_slice: int
    last_slice: int
    block: int | None  # the block that the kernel reads without a copy, or None if it reads a copy


def runs(
    bounds: Sequence[tuple[int, int]],
    in_place: Sequence[bool],
    *,
    least: int,
    most_in_place: int,
    most_gathered: int,
) -> Iterator[Run]:
    """Yield the launches that process all slices of consecutive blocks, in order.

    ``bounds`` contains the coordinates (start, stop) of each block. No block is empty. ``in_place``
    states for each block whether the kernel can read it without a copy. Blocks with fewer than
    ``least`` slices are copied nevertheless, because a launch for several small blocks is faster.
    ``most_in_place`` and ``most_gathered`` limit the number of slices in a launch without and with
    a copy.
    """
    first, end = bounds[0][0], bounds[-1][1]
    done, last = first // SLICE, -(-end // SLICE)

    def cut(start: int, stop: int, block: int | None) -> Iterator[Run]:
        step = most_gathered if block is None else most_in_place
        for s in range(start, stop, step):
            yield Run(s, min(s + step, stop), block)

    for block, ((start, stop), usable) in enumerate(zip(bounds, in_place, strict=True)):
        # The slices that lie within this block. If the first or the last slice of all blocks is
        # incomplete, it counts as well.
        low = start // SLICE if start == first else -(-start // SLICE)
        high = -(-stop // SLICE) if stop == end else stop // SLICE
        if usable and (high - low >= least or (start == first and stop == end)):
            yield from cut(done, low, None)
            yield from cut(low, high, block)
            done = high
    yield from cut(done, last, None)


def _is_in_place(block: torch.Tensor, start: int, method: Method) -> bool:
    """Return whether the kernel can read a block with first coordinate ``start`` without a copy."""
    n_rows, n = block.shape
    aligned = (
        start % method.alignment == 0
        and (n_rows == 1 or block.stride(0) % method.alignment == 0)
        and block.data_ptr() % (method.alignment * block.element_size()) == 0
    )
    return method.n_planes == 1 and (n == 1 or block.stride(1) == 1) and aligned


def _gather(
    buffer: torch.Tensor, blocks: Sequence[torch.Tensor], starts: Sequence[int], origin: int
) -> None:
    """Copy the gradients at n coordinates, from ``origin`` on, to ``buffer``.

    ``buffer`` has shape (n_planes, n_rows, n). If there are two planes, the first contains the
    values rounded to bfloat16, and the second the rounding errors. ``starts`` contains the first
    coordinate of each block. Coordinates outside of all blocks become 0.
    """
    buffer.zero_()
    for block, start in zip(blocks, starts, strict=True):
        low = max(start, origin)
        high = min(start + block.shape[1], origin + buffer.shape[2])
        if low < high:
            part = block[:, low - start : high - start]
            into = buffer[:, :, low - origin : high - origin]
            into[0].copy_(part)
            if len(into) == 2:
                torch.sub(part, into[0], out=into[1])


def project_slices(
    blocks: Sequence[torch.Tensor],
    spec: ProjectionSpec,
    offset: int,
    out: torch.Tensor,
    method: Method,
) -> None:
    """Add the projection of consecutive blocks to ``out``. No block may be empty.

    The arguments are those of ``project_cuda``, and the method that ``choose`` returned.
    """
    (n_samples, proj_dim), n_planes = out.shape, method.n_planes
    row_bytes = n_planes * max(4 * proj_dim, method.dtype.itemsize * SLICE)
    fitting = max(1, BUDGET_BYTES // 2 // row_bytes)
    if n_samples > fitting:
        for rows in (slice(row, row + fitting) for row in range(0, n_samples, fitting)):
            project_slices([block[rows] for block in blocks], spec, offset, out[rows], method)
        return
    n_rows = n_planes * n_samples
    variant = method.variant(n_rows)
    keys = round_keys(spec.seed)
    starts = [offset]
    for block in blocks:
        starts.append(starts[-1] + block.shape[1])
    # Half of the memory is for the sums of slices, and half for copies of gradients.
    sums_bytes = 4 * n_rows * proj_dim
    slice_bytes = max(sums_bytes, method.dtype.itemsize * n_rows * SLICE)
    most_in_place, most_gathered = (
        max(1, min(_MOST_SLICES, BUDGET_BYTES // 2 // size)) for size in (sums_bytes, slice_bytes)
    )
    plan = list(
        runs(
            list(pairwise(starts)),
            [_is_in_place(b, s, method) for b, s in zip(blocks, starts, strict=False)],
            least=-(-_FILL // (variant.grid[0] * variant.grid[1])),
            most_in_place=most_in_place,
            most_gathered=most_gathered,
        )
    )
    most = max(run.last_slice - run.first_slice for run in plan)
    partials = torch.empty(most * n_rows * proj_dim, dtype=torch.float32, device=out.device)
    gathered = [run.last_slice - run.first_slice for run in plan if run.block is None]
    memory = partials[:0]
    if gathered:
        n_entries = n_rows * SLICE * max(gathered)
        memory = torch.empty(n_entries, dtype=method.dtype, device=out.device)
    for run in plan:
        start, stop = max(run.first_slice * SLICE, offset), min(run.last_slice * SLICE, starts[-1])
        n_slices = run.last_slice - run.first_slice
        if run.block is None:
            # Rows that start at multiples of _STEP are aligned for every kernel. The slices remain
            # the same, because _STEP divides SLICE.
            start, stop = start // _STEP * _STEP, -(-stop // _STEP) * _STEP
            width = stop - start
            buffer = memory[: n_rows * width].view(n_planes, n_samples, width)
            _gather(buffer, blocks, starts[:-1], start)
            values, row_stride, origin = flat(buffer.view(n_rows, width)), width, start
        else:
            block = blocks[run.block]
            values, row_stride, origin = flat(block), block.stride(0), starts[run.block]
        sizes = row_stride, origin, start, stop, n_rows, run.first_slice, SLICE, proj_dim
        grid = variant.grid[0], n_slices, variant.grid[1]
        arguments = values, sizes, partials, keys, spec.stream
        types = (_ARRAYS[values.dtype], *TYPES)
        launch(variant.kernel, types, grid, variant.n_threads, *arguments)
        _add_partials(partials, n_slices, n_planes, out)

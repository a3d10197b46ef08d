"""Project gradients on a CPU with several threads, in fixed slices of coordinates.

Slices start at multiples of their length, and their sums are added in order. Therefore the result
does not depend on the number of threads, or on whether the columns of gradients are passed as one
matrix or as several blocks. If the columns are projected in several calls, the result is the same
as that of a single call if each call's columns end where a slice ends.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from multiprocessing import parent_process
from typing import TypeVar

import numpy as np
from numba.core.registry import cpu_target

from trak_core.projection.cpu.dense import normal_slice_cpu, rademacher_slice_cpu
from trak_core.projection.cpu.simd_lanes import LANES, key_of
from trak_core.projection.cpu.sketches import hadamard_slice_cpu, hashes_of, tensor_sketch_slice_cpu
from trak_core.settings import ProjectionKind, ProjectionSpec

T = TypeVar("T")

# The number of kernel calls for each thread. With several, no thread is idle for long at the end.
_CALLS = 4
# The memory limit for results of slices that must wait because they are added in order. Each thread
# may hold one result even if the results exceed this limit.
_WAITING_BYTES = 2**26
_TWO_TILES = 2 * LANES  # number of samples that a kernel may process together
# The id of the process that imported this module, or None if multiprocessing has forked this
# process, because then OpenMP may have been used before the fork.
_IMPORTER = os.getpid() if parent_process() is None else None


def pause_openmp() -> None:
    """Stop OpenMP's idle threads, so that other threads can use their cores.

    An idle thread of OpenMP polls for work for some milliseconds, and occupies a core meanwhile.
    OpenMP restarts stopped threads in less than 0.1 ms when it needs them.

    Nothing happens if OpenMP 5.0 is not loaded, or in a forked process, in which GNU's OpenMP would
    wait forever for threads of the parent. If ``os.fork`` was called before this module was
    imported, the process is not recognized as forked.

    Source: OpenMP 5.0, ``omp_pause_resource_all``.
    """
    if os.name != "posix" or os.getpid() != _IMPORTER:
        return
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(1)  # omp_pause_soft keeps the user's settings


def load_compiler() -> None:
    """Load the parts of numba that kernels need, without compiling one or starting a thread.

    If a process calls this function before it forks jobs, each job saves 0.25 s.
    """
    cpu_target.target_context.refresh()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class _Kernel:
    """The compiled function for a kind of projection, and how its work is split into calls."""

    call: Callable[..., None]  # a function with the arguments of ``rademacher_slice_cpu``
    length: int  # number of coordinates in a slice, which is enough work for a thread
    # The smallest number of samples in a call. Small calls are slow, because each call computes R.
    least_samples: int
    # The largest number of samples in a call, whose gradients and sums still fit into the caches.
    most_samples: int


# The number of coordinates in a slice for kinds whose work is proportional to proj_dim, and the
# number for other kinds.
_DENSE, _SPARSE = 2**14, 2**17
_KERNELS = {
    ProjectionKind.RADEMACHER: _Kernel(rademacher_slice_cpu, _DENSE, 16, 512),
    ProjectionKind.NORMAL: _Kernel(normal_slice_cpu, _DENSE, 128, 512),
    ProjectionKind.HADAMARD: _Kernel(hadamard_slice_cpu, _SPARSE, 16, 64),
    ProjectionKind.TENSOR_SKETCH: _Kernel(tensor_sketch_slice_cpu, _SPARSE, 16, 64),
}


def slice_length(spec: ProjectionSpec) -> int:
    """Return the number of coordinates in a slice. For ``hadamard``, proj_dim divides it."""
    length = _KERNELS[spec.kind].length
    return max(length, spec.proj_dim) if spec.kind is ProjectionKind.HADAMARD else length


def _as_float32(rows: np.ndarray) -> np.ndarray:
    if rows.dtype == np.uint16:  # the bits of bfloat16
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def _slice_rows(blocks: Sequence[np.ndarray], start: int, stop: int) -> tuple[np.ndarray, int, int]:
    """Return a matrix that contains columns ``start`` to ``stop`` of the concatenated blocks.

    Also return the indices in the matrix at which these columns start and stop. The matrix is
    C-contiguous and float32, because Numba would compile another kernel for any other layout. If a
    block has this layout and contains all the columns, the block itself is returned, not a copy.
    """
    parts = []
    first = 0
    for block in blocks:
        last = first + block.shape[1]
        is_usable = block.dtype == np.float32 and block.flags.c_contiguous
        if is_usable and first <= start and last >= stop:
            return block, start - first, stop - first
        if first < stop and last > start:
            parts.append(_as_float32(block[:, max(start - first, 0) : stop - first]))
        first = last
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return np.ascontiguousarray(rows), 0, stop - start


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a cached pool of threads. Several new threads might at first share a single core."""
    return ThreadPoolExecutor(threads)


if hasattr(os, "register_at_fork"):  # A forked process needs a new pool, as it has no threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _in_order(calls: Iterator[Callable[[], T]], threads: int, ahead: int) -> Iterator[T]:
    """Yield the results of calls in order, while several threads make the calls.

    At most ``ahead`` calls are running, or finished with a result that was not yet yielded.
    """
    first = list(islice(calls, 2 if threads > 1 else 0))
    if len(first) < 2:  # a single call, or one thread
        yield from (call() for call in chain(first, calls))
        return
    pause_openmp()
    pending = deque[Future[T]]()
    try:
        for call in chain(first, calls):
            if len(pending) == ahead:
                yield pending.popleft().result()
            pending.append(_pool(threads).submit(call))
        while pending:
            yield pending.popleft().result()
    finally:  # After an error, threads must not continue to use memory and cores.
        for future in pending:
            future.cancel()
        wait(pending)


def _shares(n_samples: int, kernel: _Kernel, n_slices: int, threads: int) -> list[slice]:
    """Return a slice of the samples for each call of a kernel.

    Samples are split so that a call's gradients and sums fit into the caches, and so that there are
    enough calls to keep all threads busy.
    """
    n_useful = 1 if threads == 1 else -(-_CALLS * threads // n_slices)
    n_shares = max(
        min(n_useful, n_samples // kernel.least_samples), -(-n_samples // kernel.most_samples)
    )
    size = -(-n_samples // (n_shares * _TWO_TILES)) * _TWO_TILES
    return [slice(start, start + size) for start in range(0, n_samples, size)]


def project_cpu(
    blocks: Sequence[np.ndarray], spec: ProjectionSpec, offset: int, threads: int, out: np.ndarray
) -> None:
    """Add the unscaled projection of the gradient blocks to ``out``.

    Each thread needs memory for a result, for the kernel's sums, and for a slice of the gradients.
    Two more results may wait to be added if all results fit into 64 MiB. The gradients of a slice
    are copied only if they are not float32, are not contiguous, or are in several blocks.

    Args:
        blocks: Matrices (n_samples, n_i) with consecutive columns and one dtype: float32, float16,
            or uint16 with the bits of bfloat16.
        spec: The projection, of any kind except ``identity``.
        offset: Coordinate of the first column.
        threads: Number of threads. They process different slices or, if there are few slices,
            different samples of a slice. Results are bitwise equal for any number of threads.
        out: Shape (n_samples, proj_dim), float32.
    """
    stop = offset + sum(block.shape[1] for block in blocks)
    if stop == offset or not len(out):
        return
    length = slice_length(spec)
    grid = range(offset // length * length, stop, length)
    kernel = _KERNELS[spec.kind]
    constants = (key_of(spec),) if spec.shapes is None else hashes_of(spec)
    shares = _shares(len(out), kernel, len(grid), threads)
    parts = [(share, [block[share] for block in blocks]) for share in shares]

    def slice_sums(at: int, share: slice, blocks: list[np.ndarray]) -> tuple[slice, np.ndarray]:
        first, last = max(offset, at), min(stop, at + length)
        part = _slice_rows(blocks, first - offset, last - offset)
        sums = np.empty((len(part[0]), out.shape[1]), np.float32)
        kernel.call(*part, first, *constants, sums)
        return share, sums

    fitting = _WAITING_BYTES * len(shares) // out.nbytes
    calls = (partial(slice_sums, at, *part) for at in grid for part in parts)
    for share, sums in _in_order(calls, threads, max(threads, min(threads + 2, fitting))):
        out[share] += sums

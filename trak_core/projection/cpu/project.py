"""Project gradients on a CPU: take the kind's kernel, and share fixed slices among threads.

Slices lie on the absolute grid of coordinates and their sums are added in order. So the result
depends neither on the number of threads, nor on how the gradient is cut into blocks, nor, where
chunks end at the edge of a slice, on the chunks.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from multiprocessing import parent_process
from typing import TypeVar

import numpy as np
from numba.core.registry import cpu_target
from numpy.lib.stride_tricks import as_strided

from trak_core.projection.cpu.dense import normal_slice_cpu, rademacher_slice_cpu
from trak_core.projection.cpu.simd_lanes import LANES
from trak_core.projection.cpu.sketches import hadamard_slice_cpu, sides_of, tensor_sketch_slice_cpu
from trak_core.spec import ProjectionKind, ProjectionSpec

T = TypeVar("T")

_WAVE = 4  # slices of one thread before all results are added up,
_WAVE_BYTES = 2**26  # and what these results may take, where it is more than one a thread
_TWO_TILES = 2 * LANES  # samples that a kernel may take together
# In a process that multiprocessing forked, OpenMP may have been used before this was imported.
_IMPORTER = os.getpid() if parent_process() is None else None
_PAUSE_SOFT = 1  # omp_pause_soft: what the user set for OpenMP stays


def pause_openmp() -> None:
    """Have OpenMP's threads end, or sleep, until this thread has work for them again.

    After their last work they go on looking for more, for milliseconds, each on a core that other
    threads could use. To start one anew takes less than a tenth of a millisecond. Nothing happens
    where no OpenMP of version 5.0 or later is loaded, as without torch, nor in a forked process,
    where GNU's would wait for ever for threads that stayed behind. A process that ``os.fork`` made
    before it imported this is not noticed.

    Source: OpenMP 5.0, ``omp_pause_resource_all``.
    """
    if os.name != "posix" or os.getpid() != _IMPORTER:
        return
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_PAUSE_SOFT)


def load_compiler() -> None:
    """Load what numba needs to run its first kernel: a quarter of a second, mostly of imports.

    Else each forked job would spend it. No kernel is compiled, and no thread is started.
    """
    cpu_target.target_context.refresh()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class _Kernel:
    """How a kind is computed.

    Attributes:
        add: Takes rows, a range of columns, the first coordinate, the key and the result.
        length: Coordinates of a slice: enough work for one thread at every proj_dim.
        share: Samples for which a slice's entries are worth making again on another thread.
        most: Samples whose rows and sums stay in the caches together; more take longer each.
    """

    add: Callable[..., None]
    length: int
    share: int
    most: int


_DENSE, _SPARSE = 2**14, 2**17  # where work grows with proj_dim, and where it does not
# The identity needs none.
_KERNELS = {
    ProjectionKind.RADEMACHER: _Kernel(rademacher_slice_cpu, _DENSE, 16, 512),
    ProjectionKind.NORMAL: _Kernel(normal_slice_cpu, _DENSE, 128, 512),
    ProjectionKind.HADAMARD: _Kernel(hadamard_slice_cpu, _SPARSE, 16, 64),
    ProjectionKind.TENSOR_SKETCH: _Kernel(tensor_sketch_slice_cpu, _SPARSE, 16, 64),
}


def slice_length(spec: ProjectionSpec) -> int:
    """Return the coordinates of a slice, which has whole blocks of ``hadamard`` in it."""
    length = _KERNELS[spec.kind].length
    return max(length, spec.proj_dim) if spec.kind is ProjectionKind.HADAMARD else length


def _as_float32(rows: np.ndarray) -> np.ndarray:
    """Return rows of float32, float16, or bfloat16 (its bits, as uint16) in float32."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def _gapless(rows: np.ndarray) -> np.ndarray | None:
    """Return the same rows without gaps, not copied: what lies between two counts as columns.

    None where that cannot be. For any other layout Numba would compile a kernel of its own, which
    takes seconds. The view goes on behind the last row, where nobody may read.
    """
    row, entry = rows.strides
    if rows.flags.c_contiguous:
        return rows
    if entry != rows.itemsize or row % entry or row < rows.shape[1] * entry:
        return None
    return as_strided(rows, (len(rows), row // entry), rows.strides)


def _slice_rows(blocks: Sequence[np.ndarray], start: int, stop: int) -> tuple[np.ndarray, int, int]:
    """Return where columns ``start`` to ``stop`` of the blocks, side by side, are in float32.

    That is a matrix and the range of its columns; columns are copied only if need be. Its layout is
    C's.
    """
    parts = []
    first = 0
    for block in blocks:
        last = first + block.shape[1]
        is_whole = first <= start and last >= stop and block.dtype == np.float32
        if is_whole and (rows := _gapless(block)) is not None:
            return rows, start - first, stop - first
        if first < stop and last > start:
            parts.append(_as_float32(block[:, max(start - first, 0) : stop - first]))
        first = last
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return np.ascontiguousarray(rows), 0, stop - start


def _kernel(spec: ProjectionSpec) -> Callable[..., None]:
    """Return the kind's kernel, called with rows, a range of columns, first coordinate, result."""
    if spec.shapes is not None:
        starts, places, buckets, signs = sides_of(spec)
        sides = starts, places, np.array(spec.shapes, np.int64), buckets, signs
        return lambda *rows, out: tensor_sketch_slice_cpu(*rows, *sides, out)
    key = np.uint32(spec.seed & 0xFFFFFFFF), np.uint32(spec.seed >> 32), np.uint32(spec.stream)
    kernel = _KERNELS[spec.kind].add
    return lambda *rows, out: kernel(*rows, key, out)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads that stay: new ones can share a core for longer than a call takes."""
    return ThreadPoolExecutor(threads)


if hasattr(os, "register_at_fork"):  # threads don't come along
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _work(left: deque[tuple[int, Callable[[], T]]], results: dict[int, T]) -> None:
    """Make calls until none is left, or one fails."""
    while True:
        try:
            i, call = left.popleft()
        except IndexError:
            return
        try:
            results[i] = call()
        except BaseException:
            left.clear()
            raise


def _in_order(calls: Iterator[Callable[[], T]], threads: int, wave_length: int) -> Iterator[T]:
    """Yield the calls' results in order, made in waves.

    This thread works too, and takes over what no other has begun: where the system has no second
    core at hand, nothing waits for it. While others finish, it hands on what there is.
    """
    if threads == 1:
        yield from (call() for call in calls)
        return
    while wave := list(islice(calls, wave_length)):
        if len(wave) > 1:
            pause_openmp()
        left, results = deque(enumerate(wave)), dict[int, T]()
        others = [_pool(threads - 1).submit(_work, left, results) for _ in range(threads - 1)]
        at = 0
        try:
            _work(left, results)
            while at in results:
                yield results.pop(at)
                at += 1
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()
        yield from (results.pop(i) for i in range(at, len(wave)))


def _shares(n_samples: int, kernel: _Kernel, n_slices: int, threads: int) -> list[slice]:
    """Cut the samples: what caches hold, and few slices keep all threads busy to the end."""
    wanted = 1 if threads == 1 else -(-_WAVE * threads // n_slices)
    n_shares = max(min(wanted, n_samples // kernel.share), -(-n_samples // kernel.most))
    size = -(-n_samples // (n_shares * _TWO_TILES)) * _TWO_TILES
    return [slice(start, start + size) for start in range(0, n_samples, size)]


def project_cpu(
    blocks: Sequence[np.ndarray], spec: ProjectionSpec, offset: int, threads: int, out: np.ndarray
) -> None:
    """Add the unscaled projection of the gradient blocks to ``out``.

    Memory beyond arguments: for each thread a result, or up to four if all are within 64 MiB, what
    its kernel adds up in, up to two results of whole tiles, and a slice of the gradients where they
    are not float32, a row's entries don't follow one another, or the slice has parts of several
    blocks.

    Blocks have shape (n_samples, n_i), all of one dtype: float32, float16, or uint16 with the bits
    of bfloat16. The first starts at ``offset``, each other where the last ends; ``out`` has shape
    (n_samples, proj_dim), float32. The spec is of any kind except ``identity``. As many slices as
    ``threads`` are worked on at a time, or shares of the samples in them, which changes no bit.
    """
    stop = offset + sum(block.shape[1] for block in blocks)
    if stop == offset or not len(out):
        return
    length = slice_length(spec)
    grid = range(offset // length * length, stop, length)
    kernel = _kernel(spec)
    shares = _shares(len(out), _KERNELS[spec.kind], len(grid), threads)

    parts = [(share, [block[share] for block in blocks]) for share in shares]

    def slice_sums(at: int, share: slice, blocks: list[np.ndarray]) -> tuple[slice, np.ndarray]:
        first, last = max(offset, at), min(stop, at + length)
        part = _slice_rows(blocks, first - offset, last - offset)
        sums = np.empty((len(part[0]), out.shape[1]), np.float32)
        kernel(*part, first, out=sums)
        return share, sums

    wave = _WAVE_BYTES * len(shares) // out.nbytes
    for share, sums in _in_order(
        (partial(slice_sums, at, *part) for at in grid for part in parts),
        threads,
        max(threads, min(_WAVE * threads * len(shares), wave)),
    ):
        out[share] += sums

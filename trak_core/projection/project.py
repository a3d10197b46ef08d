"""Project gradients by the backend of their device, and project features back, a part at a time."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trak_core.errors import InputError, listed
from trak_core.projection.cpu import project_cpu
from trak_core.projection.cpu.sketches import COLUMN_SIGNS, fill_signs
from trak_core.projection.tensor_sketch import add_rows, sides_on
from trak_core.spec import ProjectionKind, ProjectionSpec

Matrix = np.ndarray | Tensor
M = TypeVar("M", np.ndarray, Tensor)

_DTYPES = (np.float32, np.float16, torch.float32, torch.float16, torch.bfloat16)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}, dtype {value.dtype}"
    return type(value).__name__


def _checked_blocks(gradients: M | Sequence[M]) -> list[M]:
    blocks = [gradients] if isinstance(gradients, np.ndarray | Tensor) else list(gradients)
    if not blocks:
        raise InputError(
            "`gradients` must have at least one block. Found an empty sequence.",
            code="projection.no_block",
        )
    first = blocks[0]
    for block in blocks:
        known = isinstance(block, np.ndarray | Tensor) and block.dtype in _DTYPES
        if not known or block.ndim != 2:
            raise InputError(
                "`gradients` must be a matrix with one row a sample, or a sequence of such, of "
                f"dtype float32, float16 or (torch) bfloat16. Found {_described(block)}.",
                code="projection.gradients",
            )
        alike = type(block) is type(first) and block.dtype == first.dtype
        alike = alike and len(block) == len(first)
        if not alike or (isinstance(block, Tensor) and block.device != first.device):
            raise InputError(
                "The blocks of `gradients` must have the same samples, dtype and device. "
                f"Found {_described(first)} and {_described(block)}.",
                code="projection.blocks",
            )
    return blocks


def _checked_out(out: M | None, accumulate: bool, like: M, proj_dim: int) -> M:
    """Return where the result goes, zeroed unless the caller accumulates."""
    shape = (len(like), proj_dim)
    if out is None:
        if accumulate:
            raise InputError(
                "`accumulate=True` needs an `out` to add to. Found out=None.",
                code="projection.accumulate",
            )
        if isinstance(like, Tensor):
            return torch.zeros(shape, dtype=torch.float32, device=like.device)
        return np.zeros(shape, np.float32)
    good = isinstance(out, Tensor) == isinstance(like, Tensor) and tuple(out.shape) == shape
    if isinstance(out, Tensor) and isinstance(like, Tensor):
        good = good and out.dtype is torch.float32 and out.device == like.device
        good = good and not out.requires_grad
    else:
        good = good and out.dtype == np.float32
    if not good:
        raise InputError(
            f"`out` must be float32 of shape {shape}, without gradient and of the same library "
            f"and device as the gradients. Found {_described(out)}.",
            code="projection.out",
        )
    if not accumulate:
        out[:] = 0
    return out


def _array(tensor: Matrix) -> np.ndarray:
    """Return a matrix on the CPU as an array, without a copy; bfloat16 as its bits in uint16."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


def _copy_columns(blocks: Sequence[Matrix], offset: int, out: Any) -> None:
    """Add the blocks to the columns they stand for: the projection of kind ``identity``."""
    for block in blocks:
        out[:, offset : offset + block.shape[1]] += block
        offset += block.shape[1]


def _check_finite(out: Matrix) -> None:
    if isinstance(out, Tensor) and out.device.type == "cuda":
        finite = torch.isfinite(out)
    else:  # a tenth of torch's time
        finite = np.isfinite(_array(out))
    if not finite.all():
        rows = [i for i, row in enumerate(finite) if not row.all()]
        raise InputError(
            "`gradients` must be finite, and their sums must fit float32. Found NaN or infinity in "
            f"the projection of the rows {listed(rows)}.",
            code="projection.not_finite",
        )


def add_projection(
    blocks: Sequence[M], spec: ProjectionSpec, offset: int, out: M, threads: int
) -> None:
    """Add the unscaled projection of blocks to ``out``: ``project`` without its checks.

    On CUDA, where each check of numbers waits for the GPU, work is queued and nothing waits.
    """
    if spec.kind is ProjectionKind.IDENTITY:
        _copy_columns(blocks, offset, out)
    elif isinstance(out, Tensor) and out.device.type == "cuda" and spec.kind.about.of_matrices:
        add_rows(out, [block for block in blocks if isinstance(block, Tensor)], spec, offset)
    elif isinstance(out, Tensor) and out.device.type == "cuda":
        # Only here: a machine without CUDA does not need what it imports.
        from trak_core.projection.cuda import project_cuda

        project_cuda(blocks, spec, offset, out)
    elif isinstance(out, Tensor) and out.device.type != "cpu":
        raise InputError(
            f"`gradients` must be on a CPU or CUDA device. Found {out.device}.",
            code="projection.device",
        )
    else:
        arrays = [_array(block) for block in blocks]
        project_cpu(arrays, spec, offset, threads, _array(out))


def project(
    gradients: M | Sequence[M],
    spec: ProjectionSpec,
    *,
    offset: int = 0,
    out: M | None = None,
    accumulate: bool = False,
    scale: bool = False,
    threads: int = 1,
) -> M:
    r"""Project each row of ``gradients`` to ``spec.proj_dim`` dimensions.

    Computes ``Y = X R[o : o + n]``. Each entry of R is a function of the spec and its row and
    column alone (``reference.py`` defines it): R does not depend on the device, on the dtype of
    the gradients, on the batch, on how the coordinates are cut into chunks or blocks, or on the
    number of threads; where ``spec.is_nested`` not even on ``spec.proj_dim`` (the first k columns
    of a wider matrix are the k-column matrix). Sums are float32. On one device Y does not
    depend on the batch, the blocks or the threads, and chunks change it only by rounding.

    The device of the gradients decides where the work is done. On CUDA the kernel is tested when
    it is first used, and one that fails is an error, never a silent fallback.

    Which ``proj_dim`` to choose: the projected inner product of x and y differs from <x, y> by a
    standard deviation of about ``|x| |y| / sqrt(proj_dim)``, and up to sqrt(2) times that for
    parallel vectors. 1,024 columns, the workflow's default, give 3 %; four times as many halve the
    error, at four times the time and size. With more columns than training samples a normal matrix
    of the features is singular, so that damping decides the scores.

    Args:
        gradients: Shape (n_samples, n): a NumPy array (float32, float16) or a torch tensor
            (float32, float16, bfloat16); n = spec.n_params, or less for a chunk. Or a sequence of
            such matrices, one a parameter say, that stand for their columns side by side; nothing
            is concatenated. Rows may be strided.
        spec: The projection to apply.
        offset: Row of R that belongs to the first column of ``gradients``.
        out: Where the result goes, shape (n_samples, spec.proj_dim), float32, of the gradients'
            library and device; made if None.
        accumulate: Add to ``out`` instead of overwriting it.
        scale: Multiply ``out`` by ``spec.scale`` at the end, what was in it before included, so
            that E<Rx, Ry> = <x, y>.
        threads: How many threads work on a CPU.

    Returns:
        ``out``, shape (n_samples, spec.proj_dim), float32.

    Raises:
        InputError: If shapes, dtypes or devices are not as above, if the chunk does not lie within
            ``spec.n_params``, if ``accumulate`` comes without ``out``, or if a CUDA kernel cannot
            run or fails its test.
            Or if a result is not finite; ``out`` is then not usable.

    Example:
        Two gradients with 10,000 entries, kept with 1,024 numbers each:

        >>> import numpy as np
        >>> from trak_core.projection import project
        >>> from trak_core.spec import ProjectionSpec
        >>> gradients = np.random.default_rng(0).standard_normal((2, 10_000), dtype=np.float32)
        >>> spec = ProjectionSpec(
        ...     kind="rademacher", n_params=10_000, proj_dim=1024, seed=0, stream=0
        ... )
        >>> features = project(gradients, spec, scale=True)
        >>> features.shape
        (2, 1024)
        >>> error = np.abs(features @ features.T - gradients @ gradients.T).max()
        >>> bool(error < 0.1 * (gradients**2).sum(axis=1).max())
        True

        The columns may come in parts, whose results add up:

        >>> out = project(gradients[:, :4096], spec)
        >>> out = project(gradients[:, 4096:], spec, offset=4096, out=out, accumulate=True)
        >>> np.allclose(out * spec.scale, features, rtol=1e-4, atol=1e-4)
        True

    Source:
        Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023, section 3.2.
        Achlioptas, "Database-friendly random projections", JCSS 2003 (entries of one bit).
        Pham, Pagh, "Fast and scalable polynomial kernels via explicit feature maps", KDD 2013
        (tensor_sketch).
    """
    blocks = _checked_blocks(gradients)
    n_columns = sum(block.shape[1] for block in blocks)
    if offset < 0 or offset + n_columns > spec.n_params:
        raise InputError(
            f"`gradients` must lie within the projection's {spec.n_params} rows. Found columns "
            f"{offset} to {offset + n_columns}.",
            code="projection.columns",
        )
    if threads < 1:
        raise InputError(
            f"`threads` must be at least 1. Found {threads}.", code="projection.threads"
        )
    out = _checked_out(out, accumulate, blocks[0], spec.proj_dim)
    add_projection(blocks, spec, offset, out, threads)
    if scale:
        out *= spec.scale
    _check_finite(out)
    return out


# Rows of R that are made at a time, where they are made.
_ROWS = 64
# Entries of directions that are looked up at a time.
_ENTRIES = 2**18


def back_project(vectors: Tensor, spec: ProjectionSpec, offset: int, n_entries: int) -> Tensor:
    """Return ``vectors @ R[offset : offset + n_entries].T`` for the unscaled R of a projection.

    So <x, g> = <x R, v> for the direction g of a vector v and any gradient x. A tensor sketch is
    read where its entries lie, and hadamard transformed back; for the other kinds rows of R are
    made, at the cost of projecting 64 gradients. The coordinates of a tensor sketch must be those
    of one parameter. Vectors have shape (m, k), the result (m, n_entries), both float32.
    """
    if spec.kind is ProjectionKind.IDENTITY:
        return vectors[:, offset : offset + n_entries]
    if spec.shapes is not None:
        return _read_sketch(vectors, spec, offset)
    if spec.kind is ProjectionKind.HADAMARD:
        return _transformed_back(vectors, spec, offset, n_entries)
    directions = vectors.new_empty(len(vectors), n_entries)
    for first in range(0, n_entries, _ROWS):
        n = min(_ROWS, n_entries - first)
        rows = project(torch.eye(n, device=vectors.device), spec, offset=offset + first)
        directions[:, first : first + n] = vectors @ rows.T
    return directions


def _read_sketch(vectors: Tensor, spec: ProjectionSpec, offset: int) -> Tensor:
    assert spec.shapes is not None
    starts = [0, *itertools.accumulate(rows * columns for rows, columns in spec.shapes)]
    (buckets0, signs0), (buckets1, signs1) = sides_on(spec, vectors.device)[starts.index(offset)]
    directions = vectors.new_empty(len(vectors), len(buckets0), len(buckets1))
    # Rows of the matrix together, so that little is there beside what is returned.
    step = max(1, _ENTRIES // max(1, len(vectors) * len(buckets1)))
    for first in range(0, len(buckets0), step):
        rows = slice(first, first + step)
        columns = (buckets0[rows, None] + buckets1) % spec.proj_dim
        signs = (signs0[rows, None] * signs1).to(vectors.dtype)
        torch.mul(vectors[:, columns], signs, out=directions[:, rows])
    return directions.flatten(1)


def _transformed_back(vectors: Tensor, spec: ProjectionSpec, offset: int, n_entries: int) -> Tensor:
    k = spec.proj_dim
    key = np.uint32(spec.seed & 0xFFFFFFFF), np.uint32(spec.seed >> 32), np.uint32(spec.stream)
    words = np.empty(max(k // 32, 4), np.uint32)
    row_signs, column_signs = np.empty(k, np.float32), np.empty(k, np.float32)
    parts = []
    for block in range(offset // k, (offset + n_entries - 1) // k + 1):
        fill_signs(row_signs, words, 0, block, key)
        fill_signs(column_signs, words, COLUMN_SIGNS, block, key)
        x = vectors * torch.from_numpy(column_signs).to(vectors.device)
        half = 1
        while half < k:
            low, high = x.view(len(x), -1, 2, half).unbind(2)
            x = torch.stack([low + high, low - high], dim=2).view(len(x), k)
            half *= 2
        parts.append(x * torch.from_numpy(row_signs).to(vectors.device))
    start = offset - offset // k * k
    return torch.cat(parts, dim=1)[:, start : start + n_entries]

"""Multiply gradients by a random projection matrix, and vectors by the transposed matrix."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trak_core.errors import InputError, listed
from trak_core.projection.cpu.project import project_cpu
from trak_core.projection.cpu.simd_lanes import key_of
from trak_core.projection.cpu.sketches import COLUMN_SIGNS, fill_signs
from trak_core.projection.tensor_sketch import add_rows, entries_of_rows
from trak_core.settings import ProjectionKind, ProjectionSpec

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
    are_matrices = all(
        isinstance(block, np.ndarray | Tensor) and block.ndim == 2 and block.dtype in _DTYPES
        for block in blocks
    )
    kinds = {
        (type(block), len(block), block.dtype, getattr(block, "device", None))
        for block in (blocks if are_matrices else ())
    }
    if len(kinds) != 1:
        raise InputError(
            "`gradients` must be a matrix with one row for each sample, or a sequence of such "
            "matrices. All matrices must have the same type, number of rows, dtype and device. The "
            "dtype must be float32, float16 or, with torch, bfloat16. Found "
            f"{listed(map(_described, blocks)) or 'an empty sequence'}.",
            code="projection.gradients",
        )
    return blocks


def _checked_out(out: M | None, accumulate: bool, like: M, proj_dim: int) -> M:
    """Return ``out`` after checking it, or a new array if it is None.

    All entries are set to 0, unless ``accumulate`` is true.
    """
    shape = (len(like), proj_dim)
    if out is None:
        if isinstance(like, Tensor):
            return torch.zeros(shape, dtype=torch.float32, device=like.device)
        return np.zeros(shape, np.float32)
    kind = Tensor if isinstance(like, Tensor) else np.ndarray
    if not (
        isinstance(out, kind)
        and out.dtype in (np.float32, torch.float32)
        and out.device == like.device
        and not getattr(out, "requires_grad", False)
        and tuple(out.shape) == shape
    ):
        raise InputError(
            f"`out` must have dtype float32 and shape {shape}. Its library (NumPy or torch) and "
            "its device must be those of `gradients`, and it must not require gradients. Found "
            f"{_described(out)}.",
            code="projection.out",
        )
    if not accumulate:
        out[:] = 0
    return out


def _array(tensor: Matrix) -> np.ndarray:
    """Return a CPU matrix as a NumPy array, without a copy. bfloat16 is viewed as uint16."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


def _check_finite(out: Matrix) -> None:
    if isinstance(out, Tensor) and out.is_cuda:
        finite = torch.isfinite(out)
    else:  # On a CPU, NumPy takes a tenth of torch's time.
        finite = np.isfinite(_array(out))
    if not finite.all():
        rows = [i for i, row in enumerate(finite) if not row.all()]
        raise InputError(
            "`gradients` must be finite, and their projection must not overflow float32. Found NaN "
            f"or infinity in the projection of rows {listed(rows)}.",
            code="projection.not_finite",
        )


def add_projection(
    blocks: Sequence[M], spec: ProjectionSpec, offset: int, out: M, threads: int
) -> None:
    """Add the unscaled projection of blocks of gradients to ``out``, without checking arguments.

    Blocks have consecutive columns. The first column of the first block is multiplied by row
    ``offset`` of the projection matrix. On CUDA, the function returns before the GPU has finished,
    unlike ``project``, whose checks wait for the GPU.
    """
    device = out.device.type if isinstance(out, Tensor) else "cpu"
    result: Any = out
    if spec.kind is ProjectionKind.IDENTITY:
        for block in blocks:
            result[:, offset : offset + block.shape[1]] += block
            offset += block.shape[1]
    elif device == "cuda" and spec.kind.about.of_matrices:
        starts = itertools.accumulate((block.shape[1] for block in blocks), initial=offset)
        parts = [(i, x) for i, x in zip(starts, blocks, strict=False) if isinstance(x, Tensor)]
        add_rows(result, parts, spec)
    elif device == "cuda":
        # This import is here because numba-cuda need not be installed on a machine without a GPU.
        from trak_core.projection.cuda import project_cuda

        project_cuda(blocks, spec, offset, result)
    elif device != "cpu":
        raise InputError(
            f"`gradients` must be on a CPU or CUDA device. Found {device}.",
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

    Compute ``Y = X R[o : o + n]``, where X contains the gradients and has n columns, o is
    ``offset`` and R is a random matrix. Each entry of R is a function of the spec, its row and its
    column (``reference.py``), so R is never stored. This differs from projection matrices that are
    drawn from a random number generator: R does not depend on the device, the dtype of the
    gradients, the batch, the chunks or the number of threads. If ``spec.is_nested``, the first k
    columns of a wider matrix equal the matrix with k columns. Sums are computed in float32. On one
    device, Y does not depend on the batch, the blocks or the threads. Projecting chunks in several
    calls changes only rounding errors.

    The projection is computed on the device of the gradients. A CUDA kernel is tested when it is
    first used. If it fails, an error is raised, and no other device is used instead.

    The error of the projected inner product of x and y has a standard deviation of about
    ``|x| |y| / sqrt(proj_dim)``, and up to sqrt(2) times that for parallel vectors. With the
    workflow's default of 1,024 columns, the standard deviation is 3 % of ``|x| |y|``. With more
    columns than training samples, the normal matrix of the projected gradients is singular, and
    scores mainly depend on the damping.

    Args:
        gradients: Shape (n_samples, n), where n is spec.n_params, or less for a chunk. A NumPy
            array (float32, float16), a torch tensor (float32, float16, bfloat16), or a sequence of
            such matrices (blocks), which contain consecutive columns. Rows may be strided.
        spec: The projection to apply.
        offset: The row of R by which the first column of ``gradients`` is multiplied.
        out: Array for the result, shape (n_samples, spec.proj_dim), float32, of the same library
            and on the same device as the gradients. If None, it is allocated.
        accumulate: Add to ``out`` instead of overwriting it.
        scale: Multiply ``out``, including its previous content, by ``spec.scale`` at the end, so
            that E<Rx, Ry> = <x, y>.
        threads: Number of threads on a CPU.

    Returns:
        ``out``, shape (n_samples, spec.proj_dim), float32.

    Raises:
        InputError: If a shape, dtype or device is not one of the above, if the chunk extends beyond
            row ``spec.n_params`` of R, if a CUDA kernel cannot run or fails its test, or if a
            result is not finite. The content of ``out`` is then undefined.

    Example:
        Project two gradients with 10,000 entries to 1,024 dimensions:

        >>> import numpy as np
        >>> from trak_core.projection import project
        >>> from trak_core.settings import ProjectionSpec
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

        Project the columns in two parts and add the results:

        >>> out = project(gradients[:, :4096], spec)
        >>> out = project(gradients[:, 4096:], spec, offset=4096, out=out, accumulate=True)
        >>> np.allclose(out * spec.scale, features, rtol=1e-4, atol=1e-4)
        True

    Source:
        Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023, section 3.2.
        Achlioptas, "Database-friendly random projections", JCSS 2003 (entries +1 and -1).
        Pham, Pagh, "Fast and scalable polynomial kernels via explicit feature maps", KDD 2013
        (tensor_sketch).
    """
    blocks = _checked_blocks(gradients)
    n_columns = sum(block.shape[1] for block in blocks)
    if offset < 0 or offset + n_columns > spec.n_params:
        raise InputError(
            "Each column of `gradients` must have a row in the projection matrix, which has "
            f"{spec.n_params} rows. With this `offset`, the columns need rows {offset} to "
            f"{offset + n_columns - 1}. Change `offset` or the spec's `n_params`.",
            code="projection.columns",
        )
    out = _checked_out(out, accumulate, blocks[0], spec.proj_dim)
    add_projection(blocks, spec, offset, out, threads)
    if scale:
        out *= spec.scale
    _check_finite(out)
    return out


_ROWS = 64  # number of rows of the projection matrix that ``back_project`` forms at a time
_ENTRIES = 2**18  # number of entries that ``back_project`` computes at a time for a tensor sketch


def back_project(vectors: Tensor, spec: ProjectionSpec, offset: int, n_entries: int) -> Tensor:
    """Return ``vectors @ R[offset : offset + n_entries].T`` for the unscaled projection matrix R.

    This is the transpose of ``project``: if the result for a vector v is g, then
    <x, g> = <x R, v> for every gradient x. ``vectors`` has shape (m, k), and the result has shape
    (m, n_entries). Both are float32.

    For ``tensor_sketch``, the ``n_entries`` entries must be those of exactly one parameter. For
    ``rademacher`` and ``normal``, rows of R are formed, which costs as much as projecting 64
    gradients.
    """
    if spec.kind is ProjectionKind.IDENTITY:
        return vectors[:, offset : offset + n_entries]
    if spec.shapes is not None:
        return _read_sketch(vectors, spec, offset)
    if spec.kind is ProjectionKind.HADAMARD:
        return _transposed_hadamard(vectors, spec, offset, n_entries)
    directions = vectors.new_empty(len(vectors), n_entries)
    for first in range(0, n_entries, _ROWS):
        n = min(_ROWS, n_entries - first)
        rows = project(torch.eye(n, device=vectors.device), spec, offset=offset + first)
        directions[:, first : first + n] = vectors @ rows.T
    return directions


def _read_sketch(vectors: Tensor, spec: ProjectionSpec, offset: int) -> Tensor:
    assert spec.shapes is not None
    starts = [0, *itertools.accumulate(n0 * n1 for n0, n1 in spec.shapes)]
    number = starts.index(offset)
    n0, n1 = spec.shapes[number]
    directions = vectors.new_empty(len(vectors), n0, n1)
    # A few rows are computed at a time, to limit the memory for temporary tensors.
    step = max(1, _ENTRIES // max(1, len(vectors) * n1))
    for rows in (slice(first, first + step) for first in range(0, n0, step)):
        columns, signs = entries_of_rows(spec, vectors.device, number, rows)
        torch.mul(vectors[:, columns], signs.to(vectors.dtype), out=directions[:, rows])
    return directions.flatten(1)


def _transposed_hadamard(
    vectors: Tensor, spec: ProjectionSpec, offset: int, n_entries: int
) -> Tensor:
    k = spec.proj_dim
    key, words = key_of(spec), np.empty(max(k // 32, 4), np.uint32)
    row_signs, column_signs = np.empty(k, np.float32), np.empty(k, np.float32)
    parts = []
    # Block b of R is R_b = D_b H E_b with diagonal matrices of signs D_b and E_b and a Hadamard
    # matrix H (``reference.py``). Hence v R_b^T = v E_b H D_b. The inner loop multiplies by H.
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

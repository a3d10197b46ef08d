"""Project back: from vectors of k numbers to directions among the parameters, a part at a time."""

import itertools

import numpy as np
import torch
from torch import Tensor

from trak_core.projection.cpu.hadamard import COLUMN_SIGNS, fill_signs
from trak_core.projection.project import project
from trak_core.projection.tensor_sketch import sides_on
from trak_core.spec import ProjectionKind, ProjectionSpec

# Rows of R that are made at a time, where they are made.
_ROWS = 64
# Entries of directions that are looked up at a time.
_ENTRIES = 2**18


def back_project(vectors: Tensor, spec: ProjectionSpec, offset: int, n_entries: int) -> Tensor:
    """Return ``vectors @ R[offset : offset + n_entries].T`` for the unscaled R of a projection.

    So <x, g> = <x R, v> for the direction g of a vector v and any gradient x. A tensor sketch is
    read where its entries lie, and hadamard transformed back; for the other kinds rows of R are
    made, at the cost of projecting 64 gradients.

    Args:
        vectors: Shape (m, k), float32.
        spec: The projection.
        offset: First coordinate; for a tensor sketch that of a parameter.
        n_entries: How many; for a tensor sketch those of the parameter.

    Returns:
        Shape (m, n_entries), float32, on the vectors' device.
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

"""Directions of vectors among the parameters are R's own rows times them."""

from importlib import import_module

import numpy as np
import pytest
import torch

from trak_core.projection import back_project
from trak_core.projection.reference import projection_matrix
from trak_core.settings import ProjectionKind, ProjectionSpec

SHAPES = [(5, 7), (1, 3), (40, 2), (3, 33)]


@pytest.mark.parametrize("kind", ProjectionKind)
def test_back_projection_is_by_the_transpose(kind, monkeypatch):
    # Some rows of a matrix at a time.
    monkeypatch.setattr(import_module("trak_core.projection.project"), "_ENTRIES", 20)
    sizes = [rows * columns for rows, columns in SHAPES]
    n_params = sum(sizes)
    proj_dim = n_params if kind is ProjectionKind.IDENTITY else 16
    shapes = SHAPES if kind is ProjectionKind.TENSOR_SKETCH else None
    spec = ProjectionSpec(
        kind=kind, n_params=n_params, proj_dim=proj_dim, seed=3, stream=5, shapes=shapes
    )
    vectors = torch.from_numpy(np.random.default_rng(0).integers(-4, 5, (3, proj_dim)))
    matrix = projection_matrix(spec)
    offset = 0
    for size in sizes:
        actual = back_project(vectors.float(), spec, offset, size)
        expected = vectors.double().numpy() @ matrix[offset : offset + size].T
        # Sums of small integers are exact, except for numbers of the kind normal.
        bound = 1e-6 * np.abs(expected).max() if kind is ProjectionKind.NORMAL else 0
        assert np.abs(actual.numpy() - expected).max() <= bound
        offset += size

"""Tensor sketches of outer products by their factors, against the definition."""

import numpy as np
import pytest
import torch
from projections import spec_with

from trak_core.projection import OuterProducts, project, tensor_sketch
from trak_core.projection.reference import projection_matrix
from trak_core.projection.tensor_sketch import _fill_counts, add_rows
from trak_core.settings import ProjectionSpec

CPU = torch.device("cpu")


def factors(shapes, n_samples, n_tokens):
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(n_samples, n_tokens, n, generator=generator) for n in shape)
        for shape in shapes
    ]


def sketches(pairs, spec):
    sums = OuterProducts(spec, len(pairs[0][0]), CPU)
    for number, (a, b) in enumerate(pairs):
        sums.add_products(number, a, b)
    return sums.total().double()


# By Numba's kernels, or by torch as on a GPU.
BOTH_WAYS = pytest.mark.parametrize("by_kernels", [True, False])
# Sides shorter than k, longer, and a multiple of it; odd and even k; a vector, a single entry.
SHAPES = [(5, 7), (64, 1), (130, 33), (1, 1), (3, 200)]


@BOTH_WAYS
@pytest.mark.parametrize("proj_dim", [1, 2, 37, 64, 65, 512])
@pytest.mark.parametrize(("n_samples", "n_tokens"), [(1, 1), (3, 1), (4, 9)])
def test_factors_give_the_sketch_of_what_they_stand_for(
    proj_dim, n_samples, n_tokens, by_kernels, monkeypatch
):
    monkeypatch.setattr(tensor_sketch, "_has_kernels", lambda _: by_kernels)
    spec, pairs = spec_with(SHAPES, proj_dim), factors(SHAPES, n_samples, n_tokens)
    formed = torch.cat([(a.mT @ b).flatten(1) for a, b in pairs], dim=1)
    expected = formed.numpy().astype(float) @ projection_matrix(spec)
    # What is added up, without cancellation.
    size = sum((a.norm(dim=2) * b.norm(dim=2)).sum(1, keepdim=True) for a, b in pairs).numpy()
    # Pieces of one token; of some; sketches of several parameters that are transformed together.
    for piece in (1, 8, 2 * n_samples * n_tokens, 2**19):
        for name in ("_PIECE", "_PIECE_OF_GPU"):
            monkeypatch.setattr(tensor_sketch, name, piece * proj_dim)
        assert (np.abs(sketches(pairs, spec).numpy() - expected) <= 1e-6 * size).all()


@BOTH_WAYS
@pytest.mark.parametrize("exponents", [(0, 0), (-26, 20), (25, -30), (30, 4)])
def test_factors_of_any_size_are_sketched_as_exactly(exponents, by_kernels, monkeypatch):
    """Powers of ten whose squares float32 doesn't hold; other tokens keep their own precision."""
    monkeypatch.setattr(tensor_sketch, "_has_kernels", lambda _: by_kernels)
    spec, pairs = spec_with(SHAPES, 64), factors(SHAPES, 2, 6)
    scaled = [tuple(side.double() for side in pair) for pair in pairs]
    for sides in scaled:
        for side, exponent in zip(sides, exponents, strict=True):
            side[:, ::2] *= 10.0**exponent
    formed = torch.cat([(a.mT @ b).flatten(1) for a, b in scaled], dim=1)
    expected = formed.numpy().astype(float) @ projection_matrix(spec)
    size = sum((a.norm(dim=2) * b.norm(dim=2)).sum(1, keepdim=True) for a, b in scaled).numpy()
    found = sketches([tuple(side.float() for side in sides) for sides in scaled], spec)
    assert (np.abs(found.numpy() - expected) <= 1e-6 * size).all()


@BOTH_WAYS
def test_a_factor_beside_zeros_adds_nothing_unless_it_is_not_finite(by_kernels, monkeypatch):
    monkeypatch.setattr(tensor_sketch, "_has_kernels", lambda _: by_kernels)
    spec, pairs = spec_with(SHAPES, 64), factors(SHAPES, 3, 2)
    expected = sketches([(a[:, :1], b[:, :1]) for a, b in pairs], spec)
    for a, b in pairs:
        a[:, 1] *= 1e6
        b[:, 1] = 0
    assert torch.equal(sketches(pairs, spec), expected)
    pairs[0][0][0, 1, 0], pairs[0][0][1, 1, 0] = torch.inf, torch.nan
    found = sketches(pairs, spec)
    assert found[:2].isnan().all()
    assert torch.equal(found[2], expected[2])


def test_pairs_are_counted_by_torch_as_by_the_kernels(monkeypatch):
    """What runs on a GPU: exactly, with sums of small integers and no scale."""
    spec, generator = spec_with(SHAPES, 64), torch.Generator().manual_seed(1)
    for number, (n0, n1) in enumerate(SHAPES):
        a, b = (torch.randint(-3, 4, (2, 5, n), generator=generator).float() for n in (n0, n1))
        counted = [torch.empty(5, 2, 2, 64) for _ in range(2)]
        for has_kernels, counts in zip((True, False), counted, strict=True):
            monkeypatch.setattr(tensor_sketch, "_has_kernels", lambda _, has=has_kernels: has)
            _fill_counts(spec, number, a, b, counts, False)
        assert torch.equal(*counted)
        together = torch.empty(5, 2, 64, 2)
        _fill_counts(spec, number, a, b, together, True)
        assert torch.equal(together, counted[0].mT)


@pytest.mark.parametrize("proj_dim", [37, 256])
def test_rows_of_a_table_are_looked_up(proj_dim):
    shapes = [(50, 12), (4, 4)]
    spec = spec_with(shapes, proj_dim)
    indices = torch.tensor([[0, 49, 49], [7, 7, 7]])
    right = torch.randn(2, 3, 12)
    sums = OuterProducts(spec, 2, CPU)
    sums.add_lookups(0, indices, right)
    rows = torch.nn.functional.one_hot(indices, 50).float().mT @ right
    whole = torch.cat([rows.flatten(1), torch.zeros(2, 16)], dim=1).double().numpy()
    expected = whole @ projection_matrix(spec)
    np.testing.assert_allclose(sums.total().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_by_torch_as_by_the_kernel(dtype, monkeypatch):
    """Exactly: sums of small integers."""
    spec = spec_with(SHAPES, 64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, (3, spec.n_params), generator=generator).to(dtype)
    expected = project(x, spec)
    whole = torch.zeros(3, 64)
    sizes = [30, 1000, spec.n_params - 1030]
    add_rows(whole, list(zip((0, 30, 1030), x.split(sizes, dim=1), strict=True)), spec)
    assert torch.equal(whole, expected)
    part = torch.zeros(3, 64)
    monkeypatch.setattr(tensor_sketch, "_MOST_CACHED", 70)
    monkeypatch.setattr(tensor_sketch, "_MOST_COORDINATES", 150)  # and pieces of it
    add_rows(part, [(0, x[:, :100]), (4000, x[:, 4000:])], spec)
    add_rows(part, [(100, x[:, 100:4000])], spec)
    assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_factors_of_other_precision(dtype):
    spec, pairs = spec_with(SHAPES, 64), factors(SHAPES, 2, 3)
    pairs = [tuple(side.to(dtype) for side in pair) for pair in pairs]
    expected = sketches([tuple(side.float() for side in pair) for pair in pairs], spec)
    torch.testing.assert_close(sketches(pairs, spec), expected)


def test_a_spec_comes_back_from_json():
    spec = spec_with(SHAPES, 64)
    assert ProjectionSpec(**spec.as_dict()) == spec
    assert spec.scaled()["scale"] == "1"
    assert hash(spec) == hash(ProjectionSpec(**spec.as_dict()))

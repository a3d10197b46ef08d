"""The matrix as random numbers: errors of norms and inner products, moments, streams."""

from dataclasses import replace

import numpy as np
import pytest
from projections import KINDS, spec_of, spec_with

from trak_core.projection import project
from trak_core.projection.reference import projection_matrix
from trak_core.settings import stream_of


def of_pairs(x, y):
    """Sum (x_a y_b + x_b y_a)^2 over all pairs of different coordinates a, b of the last axis."""
    squares = (x**2).sum(-1) * (y**2).sum(-1) + (x * y).sum(-1) ** 2
    return squares - 2 * ((x * y) ** 2).sum(-1)


def variance(x, y, spec):
    """Var <Rx, Ry> over the choice of the matrix, for the scaled R of a kind; in float64.

    Errors come from pairs of coordinates. Those of one block of ``hadamard`` make none, because its
    rows are orthogonal; entries of ``normal`` have squares that vary, too. Source: Achlioptas, JCSS
    2003, for ``rademacher``.

    A row of ``tensor_sketch`` has one entry, so that errors come from pairs that share a column.
    Coordinates of two parameters do once in k. Those of one parameter's row never do where their
    buckets are of one run of k indices; of different runs all rows' coordinates do together, once
    in k; and so do columns. All others do once in k - 1, or in k with sides longer than k.
    """
    k, shapes = spec.proj_dim, spec.shapes
    total = of_pairs(x, y)
    if spec.kind == "normal":
        total += 2 * ((x * y) ** 2).sum()
    elif spec.kind == "hadamard":
        starts = range(0, len(x), k)
        total -= sum(of_pairs(x[start : start + k], y[start : start + k]) for start in starts)
    elif spec.kind == "tensor_sketch":
        ends = np.cumsum([n0 * n1 for n0, n1 in shapes])[:-1]
        for shape, *own in zip(shapes, np.split(x, ends), np.split(y, ends), strict=True):
            a, b = (part.reshape(shape) for part in own)
            sides = [(a, b), (a.T, b.T)]
            others = of_pairs(*own) - sum(of_pairs(*side).sum() for side in sides)
            often = k / (k - 1) if max(shape) <= k else 1
            total += often * others - of_pairs(*own) + sum(met(*side, k) for side in sides)
    return total / k


def met(a, b, k):
    """Sum (M_jl + M_lj)^2 over pairs of columns of different runs, M = a^T b."""
    products, runs = a.T @ b, np.arange(a.shape[1]) // k
    return ((products + products.T) ** 2)[runs[:, None] < runs].sum()


def gradients_of(family, n_params):
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((2, n_params))
    if family == "heavy tail":
        rows = rng.standard_t(2.2, (2, n_params))
    elif family == "1 % sparse":
        rows *= rng.random((2, n_params)) < 0.01
    elif family == "64 nonzeros":
        rows *= np.isin(np.arange(n_params), rng.choice(n_params, 64, replace=False))
    x, y = rows
    y += x  # so that the inner product is not near 0
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["heavy tail", "1 % sparse", "64 nonzeros"])
def test_norms_and_inner_products_are_distorted_as_theory_says(kind, family):
    """Mean and variance over independent streams, within three standard errors."""
    n_params, k = 4000, 64
    # With one entry a row, errors are rare and large.
    n_streams = 3000 if kind == "tensor_sketch" else 600
    rows = gradients_of(family, n_params)
    specs = [spec_of(kind, n_params, k, stream=stream) for stream in range(n_streams)]
    projected = [project(rows, spec, scale=True).astype(np.float64) for spec in specs]
    rows = rows.astype(np.float64)
    for j in (0, 1):  # the norm of the first row, and its product with the second
        expected = variance(rows[0], rows[j], specs[0])
        deviations = np.array([p[0] @ p[j] for p in projected]) - rows[0] @ rows[j]
        assert abs(deviations.mean()) < 3 * np.sqrt(expected / n_streams)
        squares = deviations**2
        assert abs(squares.mean() - expected) < 3 * squares.std() / np.sqrt(n_streams)


@pytest.mark.parametrize("shapes", [[(20, 3)], [(3, 20)], [(20, 1), (8, 5)], [(24, 24)]])
def test_sides_longer_than_a_tensor_sketch_cost_what_theory_says(shapes):
    """Norms and inner products, of gradients that are close to each other."""
    spec, n_streams = spec_with(shapes, 8, seed=1, stream=0), 1500
    rows = np.random.default_rng(4).standard_normal((2, spec.n_params)).astype(np.float32)
    rows += 2 * rows.mean(0)
    streams = [replace(spec, stream=stream) for stream in range(n_streams)]
    projected = [project(rows, own, scale=True).astype(np.float64) for own in streams]
    rows = rows.astype(np.float64)
    for j in (0, 1):
        squares = np.array([p[0] @ p[j] - rows[0] @ rows[j] for p in projected]) ** 2
        expected = variance(rows[0], rows[j], spec)
        assert abs(squares.mean() - expected) < 4 * squares.std() / np.sqrt(n_streams)


@pytest.mark.parametrize(
    ("kind", "kept"), [("rademacher", 1), ("normal", None), ("hadamard", 8), ("tensor_sketch", 1)]
)
def test_blocks_that_are_alone_in_a_gradient_have_no_error(kind, kept):
    """Whole blocks of proj_dim coordinates, single ones, or none; two blocks have errors."""
    for stream in range(8):
        spec = spec_of(kind, 16, 8, stream=stream)
        matrix = projection_matrix(spec) * spec.scale
        errors = np.abs(matrix @ matrix.T - np.eye(16))
        largest = {n: max(errors[i : i + n, i : i + n].max() for i in (0, 8)) for n in (1, 8)}
        assert max((n for n in largest if largest[n] < 1e-12), default=None) == kept
        assert errors.max() > 1e-12


def test_normal_entries_have_the_moments_of_a_normal_distribution():
    """Over all 2^32 words: the sum of four bytes takes 1,021 values."""
    weights = np.ones(1)
    for _ in range(4):
        weights = np.convolve(weights, np.ones(256) / 256)
    x = (np.arange(1021) - 510).astype(np.float32) * np.float32(1 / 147.80166)
    x2 = x * x
    p = np.float32(0.001905) * x2 + np.float32(0.004002)
    levels = ((p * x2 + np.float32(0.967765)) * x).astype(np.float64)
    seen = projection_matrix(spec_of("normal", 4000, 64))
    assert np.isin(seen, levels).all()
    assert abs(weights @ levels) < 1e-12
    assert weights @ levels**2 == pytest.approx(1, abs=2e-5)
    assert weights @ levels**4 == pytest.approx(3, abs=0.004)
    assert weights @ levels**6 == pytest.approx(15, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_seeds_are_uncorrelated(kind):
    matrices = [
        projection_matrix(spec_of(kind, 512, 64, seed, stream)).ravel()
        for seed, stream in [(0, 0), (0, 1), (1, 0), (1 << 32, 0), (0, stream_of("seed0"))]
    ]
    correlation = np.corrcoef(matrices) - np.eye(len(matrices))
    # A block of ``hadamard`` has only 128 random signs, and correlates with another's by chance.
    independent = 512 * 64 if kind != "hadamard" else 512 / 64 * 128
    assert np.abs(correlation).max() < 4 / np.sqrt(independent)

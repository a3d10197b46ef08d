"""The matrix as random numbers: distortion, moments, streams."""

from dataclasses import replace

import numpy as np
import pytest
from projections import KINDS, spec_of

from trak_core.evaluation.distortion import inner_products, product_variances
from trak_core.projection import project
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionSpec, stream_of


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
    exact, variances = inner_products(rows, rows), product_variances(rows, rows, specs[0])
    for j in (0, 1):  # the norm of the first row, and its product with the second
        expected = variances[0, j]
        deviations = np.array([p[0] @ p[j] for p in projected]) - exact[0, j]
        assert abs(deviations.mean()) < 3 * np.sqrt(expected / n_streams)
        squares = deviations**2
        assert abs(squares.mean() - expected) < 3 * squares.std() / np.sqrt(n_streams)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_side_longer_than_a_tensor_sketch_costs_what_theory_says(rank):
    """Two indices of different runs share a bucket once in k: then whole columns meet."""
    n0, n1, k, n_streams = 96, 20, 32, 1500
    rng = np.random.default_rng(3)
    g = rng.standard_normal((n0, rank)) @ rng.standard_normal((rank, n1))
    g /= np.linalg.norm(g)
    x, sizes = g.reshape(1, -1), {"n_params": n0 * n1, "proj_dim": k, "shapes": [(n0, n1)]}
    spec = ProjectionSpec(kind="tensor_sketch", **sizes, seed=1, stream=0)
    squares = []
    for stream in range(n_streams):
        y = project(x.astype(np.float32), replace(spec, stream=stream), scale=True)
        squares.append(((y.astype(np.float64) ** 2).sum() - 1) ** 2)
    expected = product_variances(x, x, spec).item()
    assert abs(np.mean(squares) - expected) < 4 * np.std(squares) / np.sqrt(n_streams)
    assert expected < (2 + 6 * ((g @ g.T) ** 2).sum()) / k


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

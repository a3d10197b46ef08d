"""The matrix as random numbers: distortion, moments, streams."""

import numpy as np
import pytest
from projections import KINDS, spec_of

from trak_core.projection import project
from trak_core.projection.reference import projection_matrix
from trak_core.spec import stream_of


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
@pytest.mark.parametrize("family", ["gaussian", "heavy tail", "1 % sparse", "64 nonzeros"])
def test_norms_and_inner_products_are_distorted_as_theory_says(kind, family):
    """Mean and variance over independent streams, within three standard errors.

    With signs, the products of a coordinate with itself are exact: a term less than a normal
    matrix has. A block of ``hadamard`` is exact in its norm: the terms within a block drop out.
    """
    n_params, k, n_streams = 4000, 64, 600
    rows = gradients_of(family, n_params)
    x, y = rows.astype(np.float64)
    inner = x @ y

    def pairs(a, b):
        """Sum over a block of the products, squared: what is exact."""
        if kind == "normal":
            return 0.0
        width = k if kind == "hadamard" else 1
        products = np.add.reduceat(a * b, np.arange(0, n_params, width))
        return (products**2).sum()

    specs = (spec_of(kind, n_params, k, stream=stream) for stream in range(n_streams))
    projected = [project(rows, spec, scale=True).astype(np.float64) for spec in specs]
    norms = np.array([p @ p for p, _ in projected])
    inners = np.array([p @ q for p, q in projected])
    variance_of_norm = 2 / k * (1 - pairs(x, x))
    if kind == "hadamard":
        # Var <Rx, Ry> = sum over pairs of different blocks of the cross terms.
        blocks = [np.add.reduceat(a * b, np.arange(0, n_params, k)) for a, b in ((x, x), (y, y))]
        exact = (blocks[0] * blocks[1]).sum() + pairs(x, y)
    else:
        exact = 0.0 if kind == "normal" else 2 * (x**2 * y**2).sum()
    variance_of_inner = (1 + inner**2 - exact) / k
    for values, mean, variance in (
        (norms, 1.0, variance_of_norm),
        (inners, inner, variance_of_inner),
    ):
        deviations = values - mean
        assert abs(deviations.mean()) < 3 * np.sqrt(variance / n_streams)
        squares = deviations**2
        assert abs(squares.mean() - variance) < 3 * squares.std() / np.sqrt(n_streams)


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

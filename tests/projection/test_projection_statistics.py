"""The matrix as random numbers: distortion, moments, streams."""

import numpy as np
import pytest
from projections import KINDS, spec_of

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


def pairs(x, y):
    """Sum of (x_p y_q + x_q y_p)^2 over the pairs of different coordinates."""
    return (x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x**2 * y**2).sum()


def within(x, y, length):
    """The same over the pairs within each run of so many coordinates."""
    starts = range(0, len(x), length)
    return sum(pairs(x[i : i + length], y[i : i + length]) for i in starts)


def variance(x, y, spec):
    """Of <Rx, Ry>: how likely two coordinates share a column, summed over the pairs.

    With signs, the products of a coordinate with itself are exact: a term less than a normal
    matrix has. A block of ``hadamard`` is exact in its norm: the terms within a block drop out. In
    a tensor sketch with sides up to k, so do those within a row, a column and a vector, and the
    differences of two buckets are never 0.
    """
    k = spec.proj_dim
    if spec.kind == "normal":
        return ((x @ x) * (y @ y) + (x @ y) ** 2) / k
    if spec.kind == "hadamard":
        return (pairs(x, y) - within(x, y, k)) / k
    if spec.kind != "tensor_sketch":
        return pairs(x, y) / k
    (n0, n1), _ = spec.shapes
    assert max(n0, n1) <= k
    (a, v), (b, w) = (np.split(one, [n0 * n1]) for one in (x, y))
    turned = [one.reshape(n0, n1).T.ravel() for one in (a, b)]
    in_matrix = pairs(a, b) - within(a, b, n1) - within(*turned, n0)
    return in_matrix / (k - 1) + (pairs(x, y) - pairs(a, b) - pairs(v, w)) / k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gaussian", "heavy tail", "1 % sparse", "64 nonzeros"])
def test_norms_and_inner_products_are_distorted_as_theory_says(kind, family):
    """Mean and variance over independent streams, within three standard errors."""
    n_params, k = 4000, 64
    # With one entry a row, errors are rare and large.
    n_streams = 3000 if kind == "tensor_sketch" else 600
    rows = gradients_of(family, n_params)
    x, y = rows.astype(np.float64)
    specs = [spec_of(kind, n_params, k, stream=stream) for stream in range(n_streams)]
    projected = [project(rows, spec, scale=True).astype(np.float64) for spec in specs]
    for a, b, values in (
        (x, x, [p @ p for p, _ in projected]),
        (x, y, [p @ q for p, q in projected]),
    ):
        expected = variance(a, b, specs[0])
        deviations = np.array(values) - a @ b
        assert abs(deviations.mean()) < 3 * np.sqrt(expected / n_streams)
        squares = deviations**2
        assert abs(squares.mean() - expected) < 3 * squares.std() / np.sqrt(n_streams)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_side_longer_than_a_tensor_sketch_costs_what_theory_says(rank):
    """Two indices of different runs share a bucket once in k: then whole columns meet.

    With M = G G^T of the rows, that adds sum_{i < j} (2 M_ij)^2 / k over the pairs of rows in
    different runs, which the rows' own entries would give a 1/k of without any column meeting.
    """
    n0, n1, k, n_streams = 96, 20, 32, 1500
    rng = np.random.default_rng(3)
    g = rng.standard_normal((n0, rank)) @ rng.standard_normal((rank, n1))
    g /= np.linalg.norm(g)
    norms = []
    for stream in range(n_streams):
        spec = ProjectionSpec(
            kind="tensor_sketch",
            n_params=n0 * n1,
            proj_dim=k,
            seed=1,
            stream=stream,
            shapes=[(n0, n1)],
        )
        y = project(g.reshape(1, -1).astype(np.float32), spec, scale=True)[0].astype(np.float64)
        norms.append(y @ y)
    m = g @ g.T
    run = np.arange(n0) // k
    others = run[:, None] != run[None, :]
    shared = (np.triu(4 * m**2, 1) * others).sum() / k
    x = g.ravel()
    apart = pairs(x, x) - within(x, x, n1) - within(g.T.ravel(), g.T.ravel(), n0)
    expected = shared + apart / k
    squares = (np.array(norms) - 1) ** 2
    assert abs(squares.mean() - expected) < 4 * squares.std() / np.sqrt(n_streams)
    assert expected < (2 + 6 * (m**2).sum()) / k


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

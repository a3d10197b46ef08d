"""Sums over subsets from features: the same as sums of scores, formed as a matrix; shared words."""

from math import log

import numpy as np
import pytest

from trak_core.attribution.solve import DampedMatrix, Spectrum, mean_squared_norm, weighted_gramians
from trak_core.evaluation.baselines import Bm25
from trak_core.evaluation.subset_sums import damped_sums, weighted_sums

N, K, M, S = 90, 24, 5, 11


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    phi = rng.standard_normal((N, K)).astype(np.float32)
    targets = rng.standard_normal((M, K))
    masks = (rng.random((S, N)) < 0.5).astype(float)
    return phi, targets, masks, rng.random((2, N))


def blocks(phi, size):
    for start in range(0, len(phi), size):
        stop = min(start + size, len(phi))
        yield start, stop, phi[start:stop]


@pytest.mark.parametrize("dim", [K, 7])
def test_damped_sums_are_sums_of_scores(case, dim):
    phi, targets, masks, weights = case
    curvature = np.linspace(0.1, 1, N)
    sums, (whole,) = weighted_sums(masks, weights, blocks(phi, 13), [curvature])
    assert np.array_equal(sums, weighted_sums(masks, weights, blocks(phi, 13))[0])
    sums, matrix = sums[:, :, :dim], whole[:dim, :dim]
    lambdas = [damping * mean_squared_norm(matrix, N) for damping in (0.1, 3)]
    found = damped_sums(sums, Spectrum.decompose(matrix), lambdas, targets[:, :dim])
    for i, shift in enumerate(lambdas):
        own = phi[:, :dim].astype(float)
        shifted = own.T @ (curvature[:, None] * own) + shift * np.eye(dim)
        scores = phi[:, :dim] @ np.linalg.inv(shifted) @ targets[:, :dim].T
        for j, w in enumerate(weights):
            expected = masks @ (scores * w[:, None])
            assert np.abs(found[i, j] - expected).max() < 1e-10 * np.abs(expected).max()


def test_squares_are_the_diagonal_of_the_scores(case):
    phi = case[0]
    (matrix,) = weighted_gramians([(phi, [np.ones(N)])])
    squared = mean_squared_norm(matrix, N)
    found = DampedMatrix.factorize(matrix, squared).squares(phi)
    expected = np.diagonal(phi @ np.linalg.inv(matrix + squared * np.eye(K)) @ phi.T)
    assert np.abs(found - expected).max() < 1e-6 * expected.max()


def test_bm25_is_its_formula():
    rng = np.random.default_rng(1)
    drawn = [rng.choice([*"abcdefgh"], size, p=np.arange(1, 9) / 36) for size in (*range(30), 400)]
    texts = [own.tolist() for own in drawn]
    texts[0] = []
    mean = np.mean([len(text) for text in texts])
    for question in (["a"], [*"abba"], [*"hgh", "nowhere"], [], ["nowhere"]):
        expected = []
        for text in texts:
            score = 0
            for word in set(question):
                n = sum(word in other for other in texts)
                times = text.count(word)
                rare = log(1 + (len(texts) - n + 0.5) / (n + 0.5))
                length = 1.2 * (1 - 0.75 + 0.75 * len(text) / mean)
                score += rare * times * (1.2 + 1) / (times + length)
            expected.append(score)
        np.testing.assert_allclose(Bm25.of(texts).scores(question), expected, rtol=1e-12)
    assert Bm25.of([[], []]).scores(["a"]).tolist() == [0, 0]

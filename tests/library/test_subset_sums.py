"""Subset sums from features equal sums of a matrix of scores. BM25 is its formula."""

from math import log

import numpy as np
import pytest

from trak_core.attribution.solve import DampedMatrix, Spectrum, mean_squared_norm, weighted_gramians
from trak_core.evaluation.baselines import bm25_scores
from trak_core.evaluation.subset_sums import (
    CheckpointRows,
    average_weights,
    damped_sums,
    setting_sums,
    weighted_sums,
)
from trak_core.settings import Combine, Setting

N, K, M, S = 90, 24, 5, 11


RNG = np.random.default_rng(0)
PHI = RNG.standard_normal((N, K)).astype(np.float32)
TARGETS = RNG.standard_normal((M, K))
MASKS = (RNG.random((S, N)) < 0.5).astype(float)
WEIGHTS = RNG.random((2, N))


@pytest.mark.parametrize("dim", [K, 7])
def test_damped_sums_are_sums_of_scores(dim):
    curvature = np.linspace(0.1, 1, N)
    given = MASKS, WEIGHTS, lambda start, stop: PHI[start:stop], 13
    sums, (whole,) = weighted_sums(*given, [curvature])
    assert np.array_equal(sums, weighted_sums(*given)[0])
    sums, matrix = sums[:, :, :dim], whole[:dim, :dim]
    ridges = [damping * mean_squared_norm(matrix, N) for damping in (0.1, 3)]
    result = damped_sums(sums, Spectrum.decompose(matrix), ridges, TARGETS[:, :dim])
    for i, ridge in enumerate(ridges):
        own = PHI[:, :dim].astype(float)
        damped = own.T @ (curvature[:, None] * own) + ridge * np.eye(dim)
        scores = PHI[:, :dim] @ np.linalg.inv(damped) @ TARGETS[:, :dim].T
        for j, w in enumerate(WEIGHTS):
            expected = MASKS @ (scores * w[:, None])
            assert np.abs(result[i, j] - expected).max() < 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("combine", list(Combine))
def test_a_normal_matrix_that_is_given_replaces_that_of_features(combine):
    rows = RNG.standard_normal((3 * K, K))
    normal, q, power, dim = rows.T @ rows, WEIGHTS[0], 0.75, 7
    setting = Setting(damping=0.3, loss_weight_power=power, combine=combine, proj_dim=dim)
    own = {power: np.ones(N)}, lambda start, stop: PHI[start:stop]
    checkpoint = CheckpointRows(q, *own, TARGETS, 13, normal)
    averages = average_weights([setting], [q])
    (result,) = setting_sums(MASKS, [setting], averages, checkpoint).values()
    phi, normal = PHI[:, :dim].astype(float), normal[:dim, :dim]
    inverse = np.linalg.inv(normal + 0.3 * np.trace(normal) / N * np.eye(dim))
    scores = q[:, None] ** power * (phi @ inverse @ TARGETS[:, :dim].T)
    if combine is Combine.UNIT_AVERAGE:
        scores /= np.linalg.norm(q[:, None] ** power * (phi @ inverse @ phi.T))
    np.testing.assert_allclose(result, MASKS @ scores, rtol=1e-8)


def test_squares_are_the_diagonal_of_the_scores():
    (matrix,) = weighted_gramians([(PHI, [np.ones(N)])])
    ridge = mean_squared_norm(matrix, N)
    squares = DampedMatrix.factorize(matrix, ridge).squares(PHI)
    expected = np.diagonal(PHI @ np.linalg.inv(matrix + ridge * np.eye(K)) @ PHI.T)
    assert np.abs(squares - expected).max() < 1e-6 * expected.max()


def test_bm25_is_its_formula():
    rng = np.random.default_rng(1)
    drawn = [rng.choice([*"abcdefgh"], size, p=np.arange(1, 9) / 36) for size in (*range(30), 400)]
    texts = [own.tolist() for own in drawn]
    texts[0] = []
    mean = np.mean([len(text) for text in texts])
    for query in ([*"abba"], [*"hgh", "nowhere"], []):
        expected = []
        for text in texts:
            score = 0
            for word in set(query):
                n = sum(word in other for other in texts)
                times = text.count(word)
                rare = log(1 + (len(texts) - n + 0.5) / (n + 0.5))
                length = 1.2 * (1 - 0.75 + 0.75 * len(text) / mean)
                score += rare * times * (1.2 + 1) / (times + length)
            expected.append(score)
        np.testing.assert_allclose(next(bm25_scores(texts, [query])), expected, rtol=1e-12)
    assert next(bm25_scores([[], []], [["a"]])).tolist() == [0, 0]

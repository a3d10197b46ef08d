"""Subset sums from features equal sums of a matrix of scores. BM25 is its formula."""

from math import log

import numpy as np
import pytest

from trak_core.attribution.solve import DampedMatrix, mean_squared_norm, weighted_gramians
from trak_core.evaluation.baselines import bm25_scores
from trak_core.evaluation.subset_sums import CheckpointRows, average_weights, setting_sums
from trak_core.settings import Combine, Setting

N, K, M, S = 90, 24, 5, 11


RNG = np.random.default_rng(0)
PHI = RNG.standard_normal((N, K)).astype(np.float32)
TARGETS = RNG.standard_normal((M, K))
MASKS = (RNG.random((S, N)) < 0.5).astype(float)
WEIGHTS = RNG.random(N)


@pytest.mark.parametrize("dim", [K, 7])
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("combine", list(Combine))
def test_sums_of_settings_are_sums_of_scores(combine, is_given, dim):
    """The normal matrix is that of the features, or another one that is given."""
    q, power, curvature = WEIGHTS, 0.75, np.linspace(0.1, 1, N)
    rows = RNG.standard_normal((3 * K, K))
    settings = [
        Setting(damping=damping, loss_weight_power=power, combine=combine, proj_dim=dim)
        for damping in (0.1, 3)
    ]
    own = {power: curvature}, lambda start, stop: PHI[start:stop]
    checkpoint = CheckpointRows(q, *own, TARGETS, 13, rows.T @ rows if is_given else None)
    sums = setting_sums(MASKS, settings, average_weights(settings, [q]), checkpoint)
    phi = PHI[:, :dim].astype(float)
    normal = (rows.T @ rows)[:dim, :dim] if is_given else phi.T @ (curvature[:, None] * phi)
    for setting in settings:
        ridge = setting.damping * np.trace(normal) / N
        inverse = np.linalg.inv(normal + ridge * np.eye(dim))
        scores = q[:, None] ** power * (phi @ inverse @ TARGETS[:, :dim].T)
        if combine is Combine.UNIT_AVERAGE:
            scores /= np.linalg.norm(q[:, None] ** power * (phi @ inverse @ phi.T))
        np.testing.assert_allclose(sums[setting], MASKS @ scores, rtol=1e-8)


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

"""Rank correlations, intervals, noise ceiling and BM25 agree with SciPy and plain loops."""

from math import log

import numpy as np
import pytest
from scipy import stats
from scipy.stats import spearmanr

from trak_core.evaluation.baselines import bm25_scores
from trak_core.evaluation.intervals import (
    CONFIDENCE,
    Variances,
    interval,
    mean_interval,
    rescaled_intervals,
)
from trak_core.evaluation.lds import bootstrap, noise_ceiling, rank_correlations
from trak_core.study.retraining_draws import random_removal, random_subset, training_seed


def tied(rng, shape):
    """Return random numbers, many of them equal."""
    return rng.integers(0, 12, shape).astype(float)


@pytest.mark.parametrize("draw", [tied, lambda rng, shape: rng.standard_normal(shape)])
@pytest.mark.parametrize("shape", [(2, 3), (37, 5)])
def test_rank_correlations_are_scipys(draw, shape):
    rng = np.random.default_rng(1)
    a = draw(rng, shape)
    b = a + draw(rng, shape)
    b[0, 0] = b.max() + 1  # no column is constant
    a[0] = a.max() + np.arange(shape[1]) + 1
    expected = [spearmanr(a[:, j], b[:, j]).statistic for j in range(shape[1])]
    assert np.abs(rank_correlations(a, b) - expected).max() < 1e-12


def test_a_constant_column_orders_nothing():
    a = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert rank_correlations(a, a).tolist() == [1, 0]
    assert rank_correlations(a, -a).tolist() == [-1, 0]


def test_bootstrap_intervals_are_those_of_resampled_rows():
    rng = np.random.default_rng(3)
    outputs = tied(rng, (1, 25, 6))
    predictions = [outputs[0] + tied(rng, (25, 6)), rng.standard_normal((25, 6))]
    intervals = interval(bootstrap(predictions, outputs, n_draws=40, seed=9), axis=0)
    rng = np.random.default_rng(9)
    draws = [(rng.integers(25, size=25), rng.integers(6, size=6)) for _ in range(40)]
    for prediction, *ends in zip(predictions, *intervals, strict=True):
        means = [
            np.mean([spearmanr(prediction[rows, j], outputs[0, rows, j]).statistic for j in own])
            for rows, own in draws
        ]
        assert np.abs(ends - np.quantile(means, [0.025, 0.975])).max() < 1e-12


@pytest.mark.parametrize("n_seeds", [2, 4])
def test_the_noise_ceiling_is_the_correlation_of_expected_outputs(n_seeds):
    rng = np.random.default_rng(5)
    truth = rng.standard_normal((2000, 20))
    outputs = truth + 1.5 * rng.standard_normal((n_seeds, 2000, 20))
    reached = rank_correlations(truth, outputs.mean(axis=0))
    ceiling = noise_ceiling(outputs).mean()
    assert abs(ceiling - reached.mean()) < 0.01
    low, high = interval(bootstrap([truth[:500]], outputs[:, :500], n_draws=50)[:, -1], axis=0)
    assert low < ceiling < high


def test_the_noise_ceiling_of_two_seeds_is_spearman_and_browns():
    rng = np.random.default_rng(6)
    truth = rng.standard_normal((40, 3))
    outputs = truth + rng.standard_normal((2, 40, 3))
    rho = rank_correlations(*outputs)
    assert np.abs(noise_ceiling(outputs) ** 2 - 2 * rho / (1 + rho)).max() < 1e-12
    assert noise_ceiling(np.stack([truth, -truth])).tolist() == [0, 0, 0]


def test_random_subsets_have_one_size_and_differ():
    halves = np.stack([random_subset(31, 15, i, seed=0) for i in range(300)])
    assert (halves.sum(axis=1) == 15).all()
    assert len({half.tobytes() for half in halves}) == 300
    # Each sample is in about half of them, within 4 standard deviations.
    assert (abs(halves.mean(axis=0) - 15 / 31) < 4 * 0.5 / np.sqrt(300)).all()
    assert not np.array_equal(halves[0], random_subset(31, 15, 0, seed=1))
    assert (~random_removal(31, 4, draw=0, seed=0)).sum() == 4
    seeds = {training_seed(0, subset, repeat) for subset in range(50) for repeat in range(3)}
    assert len(seeds) == 150


@pytest.mark.parametrize("n", [2, 20])
def test_differences_of_one_kind_give_students_interval(n):
    """All targets share the models, so a hundred of them give the interval of one."""
    shifts = np.random.default_rng(n).standard_normal(n)
    expected = stats.t.interval(CONFIDENCE, n - 1, shifts.mean(), stats.sem(shifts))
    of_targets = shifts[None]
    for values in (shifts[:, None].repeat(100, axis=1), of_targets.repeat(100, axis=0), of_targets):
        assert mean_interval(values) == pytest.approx(expected, rel=1e-9)
    assert mean_interval(np.full((1, 1), 2.0)) == (2, 2)


@pytest.mark.parametrize(
    ("seeds", "targets", "sizes"),
    [(3, 50, (1, 0, 0)), (5, 100, (0.3, 1, 1)), (5, 100, (0, 1, 0)), (5, 5, (1, 1, 1))],
)
def test_the_interval_contains_the_true_mean(seeds, targets, sizes):
    """Trainings, targets and both together shift the numbers, whose true mean is 0."""
    random, held, n_experiments = np.random.default_rng(5), 0, 1000
    for _ in range(n_experiments):
        shapes = (seeds, 1), (1, targets), (seeds, targets)
        values = sum(
            size * random.standard_normal(shape) for size, shape in zip(sizes, shapes, strict=True)
        )
        low, high = mean_interval(np.broadcast_to(values, (seeds, targets)))
        held += low <= 0 <= high
    # 95 % minus three standard errors. Noise that varies with both may make it more.
    assert held / n_experiments > 0.929


def test_variances_are_added_by_welchs_formula():
    random = np.random.default_rng(1)
    a, b = random.standard_normal(4), 3 * random.standard_normal(9)
    parts = [Variances(np.array(x.var(ddof=1) / len(x)), np.array(len(x) - 1.0)) for x in (a, b)]
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(CONFIDENCE)
    half = (expected.high - expected.low) / 2
    assert float((parts[0] + parts[1]).half_width()) == pytest.approx(half, rel=1e-9)


def test_expanded_intervals_stay_asymmetric():
    draws = np.random.default_rng(2).exponential(size=(2, 4000))
    variances = Variances(draws.var(axis=1, ddof=1), np.array([np.inf, 4.0]))
    low, high = rescaled_intervals(draws, np.ones(2), variances)
    ends = np.quantile(draws, [0.025, 0.975], axis=1)
    np.testing.assert_allclose([low[0], high[0]], ends[:, 0], rtol=1e-6)
    factor = stats.t.ppf(0.975, 4) / stats.norm.ppf(0.975)
    np.testing.assert_allclose([low[1], high[1]], 1 + (ends[:, 1] - 1) * factor, rtol=1e-6)


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

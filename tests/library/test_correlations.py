"""Rank correlations, bootstrap and noise ceiling agree with SciPy and plain loops."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from trak_core.evaluation.intervals import interval
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

"""Intervals of means and draws contain the true value as often as they should."""

import numpy as np
import pytest
from scipy import stats

from trak_core.evaluation.intervals import CONFIDENCE, Chance, expanded, mean_interval


@pytest.mark.parametrize("n", [2, 20])
def test_differences_between_trainings_alone_give_students_interval(n):
    """All targets share the models, so a hundred of them give the interval of one."""
    shifts = np.random.default_rng(n).standard_normal(n)
    expected = stats.t.interval(CONFIDENCE, n - 1, shifts.mean(), stats.sem(shifts))
    for values in (shifts[:, None].repeat(100, axis=1), shifts[None].repeat(100, axis=0)):
        assert mean_interval(values) == pytest.approx(expected, rel=1e-9)


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


def test_one_training_gives_the_interval_of_targets_alone():
    targets = np.random.default_rng(0).standard_normal((1, 30))
    expected = stats.t.interval(CONFIDENCE, 29, targets.mean(), stats.sem(targets[0]))
    assert mean_interval(targets) == pytest.approx(expected, rel=1e-9)
    assert mean_interval(np.full((1, 1), 2.0)) == (2, 2)


def test_variances_are_added_by_welchs_formula():
    random = np.random.default_rng(1)
    a, b = random.standard_normal(4), 3 * random.standard_normal(9)
    parts = [Chance(np.array(x.var(ddof=1) / len(x)), np.array(len(x) - 1.0)) for x in (a, b)]
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(CONFIDENCE)
    half = (expected.high - expected.low) / 2
    assert float((parts[0] + parts[1]).half_width()) == pytest.approx(half, rel=1e-9)


def test_expanded_intervals_stay_asymmetric():
    draws = np.random.default_rng(2).exponential(size=(2, 4000))
    chance = Chance(draws.var(axis=1, ddof=1), np.array([np.inf, 4.0]))
    low, high = expanded(draws, np.ones(2), chance)
    ends = np.quantile(draws, [0.025, 0.975], axis=1)
    np.testing.assert_allclose([low[0], high[0]], ends[:, 0], rtol=1e-6)
    factor = stats.t.ppf(0.975, 4) / stats.norm.ppf(0.975)
    np.testing.assert_allclose([low[1], high[1]], 1 + (ends[:, 1] - 1) * factor, rtol=1e-6)

"""Intervals of means and draws: how often they hold the truth, in simulated experiments."""

import numpy as np
import pytest
from scipy import stats

from trak_core.evaluation.intervals import CONFIDENCE, Chance, expanded, mean_interval


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_what_differs_by_training_alone_has_students_interval(n):
    """All targets share the models: a hundred of them are no more than one."""
    shifts = np.random.default_rng(n).standard_normal(n)
    expected = stats.t.interval(CONFIDENCE, n - 1, shifts.mean(), stats.sem(shifts))
    # Each training of its own on the other side as well.
    for values in (shifts[:, None].repeat(100, axis=1), shifts[None].repeat(100, axis=0)):
        assert mean_interval(values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("seeds", "targets", "sizes"),
    [
        (3, 50, (1, 0, 0)),
        (5, 100, (1, 0, 0)),
        (5, 100, (0.3, 1, 1)),
        (5, 100, (0, 1, 0)),
        (5, 5, (1, 1, 1)),
    ],
)
def test_means_over_trainings_and_targets_lie_within(seeds, targets, sizes):
    """Trainings, targets and both together shift the numbers; the mean that they come from is 0.

    A bootstrap of five trainings held it in 83 of 100 experiments where trainings differ alone.
    """
    random, held, n_experiments = np.random.default_rng(5), 0, 1000
    for _ in range(n_experiments):
        shapes = (seeds, 1), (1, targets), (seeds, targets)
        values = sum(
            size * random.standard_normal(shape) for size, shape in zip(sizes, shapes, strict=True)
        )
        values = np.broadcast_to(values, (seeds, targets))
        low, high = mean_interval(values)
        held += low <= 0 <= high
    # 95 %, less three standard errors; what varies with both at once may make it more.
    assert held / n_experiments > 0.929


def test_one_training_says_nothing_of_others():
    targets = np.random.default_rng(0).standard_normal((1, 30))
    expected = stats.t.interval(CONFIDENCE, 29, targets.mean(), stats.sem(targets[0]))
    assert mean_interval(targets) == pytest.approx(expected, rel=1e-9)
    assert mean_interval(np.full((1, 1), 2.0)) == (2, 2)


def test_chances_are_added_as_welch_did():
    random = np.random.default_rng(1)
    a, b = random.standard_normal(4), 3 * random.standard_normal(9)
    parts = [Chance(np.array(x.var(ddof=1) / len(x)), np.array(len(x) - 1.0)) for x in (a, b)]
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(CONFIDENCE)
    half = (expected.high - expected.low) / 2
    assert float((parts[0] + parts[1]).half_width()) == pytest.approx(half, rel=1e-9)


def test_expanded_intervals_keep_their_lopsidedness():
    draws = np.random.default_rng(2).exponential(size=(2, 4000))
    chance = Chance(draws.var(axis=1, ddof=1), np.array([np.inf, 4.0]))
    low, high = expanded(draws, np.ones(2), chance)
    ends = np.quantile(draws, [0.025, 0.975], axis=1)
    np.testing.assert_allclose([low[0], high[0]], ends[:, 0], rtol=1e-6)
    factor = stats.t.ppf(0.975, 4) / stats.norm.ppf(0.975)
    np.testing.assert_allclose([low[1], high[1]], 1 + (ends[:, 1] - 1) * factor, rtol=1e-6)

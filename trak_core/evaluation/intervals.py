"""Compute 95 % confidence intervals of means and of bootstrap draws for small samples.

Bootstrap percentile intervals are too short for small samples. With five training runs, they
contain the true mean in 83 % of cases. Therefore variances have the divisor n - 1, widths use
Student's quantile, and independent variances are added by Welch's formula.

Source: Welch, "The generalization of 'Student's' problem when several different population
    variances are involved", Biometrika 34, 1947; Hesterberg, "What Teachers Should Know About the
    Bootstrap", The American Statistician 69, 2015, for the expanded percentiles.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

# The probability that an interval contains the true value.
CONFIDENCE = 0.95
_OUTSIDE = (1 - CONFIDENCE) / 2


class Chance(NamedTuple):
    """An estimate of a variance, and its degrees of freedom.

    Both have any shape, float64. The variance is 0 where the degrees of freedom are 0.
    """

    variance: np.ndarray
    freedom: np.ndarray

    def __add__(self, other: "Chance") -> "Chance":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add an independent variance. Degrees of freedom are infinite if both variances are 0."""
        # Welch's degrees of freedom of a + b are (a + b)^2 / (a^2 / freedom_a + b^2 / freedom_b).
        total = self.variance + other.variance
        pieces = [own.variance**2 / np.maximum(own.freedom, 1) for own in (self, other)]
        small = np.asarray(pieces[0] + pieces[1], dtype=np.float64)
        freedom = np.full(small.shape, np.inf)
        np.divide(total**2, small, out=freedom, where=small > 0)
        return Chance(total, freedom)

    def part(self, entries: int | slice) -> "Chance":
        """Return some of the entries of both arrays."""
        return Chance(self.variance[entries], self.freedom[entries])

    def half_width(self) -> np.ndarray:
        """Return half of the interval's width: the standard error times Student's quantile."""
        # SciPy has no quantile for infinite degrees of freedom.
        freedom = np.minimum(self.freedom, 1e9)
        return stdtrit(freedom, 1 - _OUTSIDE) * np.sqrt(self.variance)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean of ``values``, shape (seeds, targets).

    The seeds of training runs and the targets are both treated as random samples of a population.
    All targets share the models, so the differences between models do not average out over targets.
    Noise that varies with both is counted twice, so the interval may be too long, but not too
    short. With one seed (or one target), the interval does not account for differences between
    seeds (or targets).
    """
    seeds, targets = values.shape
    # The variance of a mean of n numbers is s^2 / n, with n - 1 degrees of freedom.
    parts = [
        Chance(values.mean(axis=axis).var(ddof=int(n > 1)) / n, np.array(n - 1.0))
        for axis, n in ((1, seeds), (0, targets))
    ]
    half, mean = float((parts[0] + parts[1]).half_width()), float(values.mean())
    return mean - half, mean + half


def accuracy_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the interval of a mean of ones and zeros, or of their differences.

    If all models agree on all n targets, the values have no variance. At 95 % confidence, however,
    models may differ on up to about 3 / n of all possible targets. Therefore the interval is
    widened if models differ on fewer than one target. ``values`` have shape (seeds, targets).

    Source: Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", Journal of
        the American Medical Association 249, 1983.
    """
    low, high = mean_interval(values)
    n_targets = values.shape[1]
    unseen = 1 - (1 - CONFIDENCE) ** (1 / n_targets)
    for alike in (-1, 0, 1):
        if np.abs(values - alike).mean() < 1 / n_targets:
            low, high = min(low, alike - unseen), max(high, alike + unseen)
    return low, high


def interval(draws: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the percentile interval along an axis. Draws that are NaN are ignored."""
    low, high = np.nanquantile(draws, [_OUTSIDE, 1 - _OUTSIDE], axis=axis)
    return low, high


def expanded(
    draws: np.ndarray, estimates: np.ndarray, chance: Chance
) -> tuple[np.ndarray, np.ndarray]:
    """Return percentile intervals, widened to the half width of ``chance``.

    Draws have shape (..., draws), and estimates and chances have shape (...). The distances from
    the estimate to both ends are multiplied by one factor, so the interval keeps its asymmetry.
    """
    spread = np.nanstd(draws, axis=-1, ddof=1)
    wide = chance.half_width()
    factor = np.ones_like(wide)
    np.divide(wide, ndtri(1 - _OUTSIDE) * spread, out=factor, where=spread > 0)
    low, high = (estimates + (end - estimates) * factor for end in interval(draws, axis=-1))
    return low, high

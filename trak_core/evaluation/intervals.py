"""Compute 95 % confidence intervals of means, from small samples or from bootstrap draws.

Percentile intervals of the bootstrap are too short for small samples. With five training runs, they
contain the true mean in only 83 % of cases. Therefore variances are computed with the divisor
n - 1, intervals use Student's quantile, and independent variances are added by Welch's formula.

Source: Welch, "The generalization of 'Student's' problem when several different population
    variances are involved", Biometrika 34, 1947; Hesterberg, "What Teachers Should Know About the
    Bootstrap", The American Statistician 69, 2015, for the expanded percentiles.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

# The probability with which an interval contains the true value.
CONFIDENCE = 0.95
_OUTSIDE = (1 - CONFIDENCE) / 2


class Variances(NamedTuple):
    """Variances that were estimated from samples, and their degrees of freedom.

    The two arrays have the same shape, float64. A variance with 0 degrees of freedom is 0.
    """

    variance: np.ndarray
    freedom: np.ndarray

    def __add__(self, other: "Variances") -> "Variances":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return sums of independent variances, with Welch's degrees of freedom."""
        # The degrees of freedom of a + b are (a + b)^2 / (a^2 / freedom_a + b^2 / freedom_b), or
        # infinite if a and b are 0.
        total = self.variance + other.variance
        pieces = [own.variance**2 / np.maximum(own.freedom, 1) for own in (self, other)]
        small = np.asarray(pieces[0] + pieces[1], dtype=np.float64)
        freedom = np.full(small.shape, np.inf)
        np.divide(total**2, small, out=freedom, where=small > 0)
        return Variances(total, freedom)

    def select(self, entries: int | slice) -> "Variances":
        """Return some of the variances, with their degrees of freedom."""
        return Variances(self.variance[entries], self.freedom[entries])

    def half_width(self) -> np.ndarray:
        """Return the half-widths of confidence intervals of estimates with these variances."""
        # Some versions of SciPy return NaN for infinite degrees of freedom.
        freedom = np.minimum(self.freedom, 1e9)
        return stdtrit(freedom, 1 - _OUTSIDE) * np.sqrt(self.variance)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the confidence interval of the mean of ``values``, shape (seeds, targets).

    Seeds and targets are treated as random samples of two populations. Differences between models
    do not average out over targets, because all targets are measured on the same models. Therefore
    the variance over seeds and the variance over targets are added. Independent noise in each value
    is part of both variances, so the interval may be too long, but it is not too short. With only
    one seed or only one target, the interval ignores differences between seeds or between targets.
    """
    seeds, targets = values.shape
    # The variance of a mean of n numbers is s^2 / n, with n - 1 degrees of freedom.
    parts = [
        Variances(values.mean(axis=axis).var(ddof=int(n > 1)) / n, np.array(n - 1.0))
        for axis, n in ((1, seeds), (0, targets))
    ]
    half, mean = float((parts[0] + parts[1]).half_width()), float(values.mean())
    return mean - half, mean + half


def accuracy_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the confidence interval of the mean of accuracies, or of differences of accuracies.

    ``values`` contains 0 or 1 for each answer, or differences of such numbers, and has shape
    (seeds, targets). Values that are all equal have no variance. Even then, up to about 3 / n of
    all possible targets may have other values at 95 % confidence, where n is the number of targets.
    Therefore the interval is widened if almost all values are equal, so that fewer than one target
    for each seed has a different value.

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
    """Return the ends of the 95 % percentile interval of ``draws`` along an axis, ignoring NaN."""
    low, high = np.nanquantile(draws, [_OUTSIDE, 1 - _OUTSIDE], axis=axis)
    return low, high


def rescaled_intervals(
    draws: np.ndarray, estimates: np.ndarray, variances: Variances
) -> tuple[np.ndarray, np.ndarray]:
    """Return the percentile intervals of bootstrap draws, with widths that match ``variances``.

    ``draws`` has shape (..., n_draws), and ``estimates`` and ``variances`` have shape (...). The
    distances from an estimate to the two ends of its interval are multiplied by the same factor, so
    that the interval keeps its asymmetry.
    """
    spread = np.nanstd(draws, axis=-1, ddof=1)
    half_width = variances.half_width()
    factor = np.ones_like(half_width)
    np.divide(half_width, ndtri(1 - _OUTSIDE) * spread, out=factor, where=spread > 0)
    low, high = (estimates + (end - estimates) * factor for end in interval(draws, axis=-1))
    return low, high

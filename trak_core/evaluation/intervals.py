"""95 % intervals of means and of draws, as wide as few trainings and samples make them.

A percentile interval of a bootstrap takes the spread of n numbers for that of all there could be.
With five trainings it holds the truth 83 times in a hundred where it says 95. So variances have the
divisor n - 1, widths are Student's, and two kinds of chance are added up as Welch did.

Source: Welch, "The generalization of 'Student's' problem when several different population
    variances are involved", Biometrika 34, 1947; Hesterberg, "What Teachers Should Know About the
    Bootstrap", The American Statistician 69, 2015, for the expanded percentiles.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

# The part of cases in which an interval shall hold the truth.
CONFIDENCE = 0.95
_OUTSIDE = (1 - CONFIDENCE) / 2


class Chance(NamedTuple):
    """What chance adds to an estimate: a variance, and how many numbers it is known from, less 1.

    Both have any shape, float64. Without freedom nothing is known, and the variance is 0.
    """

    variance: np.ndarray
    freedom: np.ndarray

    def __add__(self, other: "Chance") -> "Chance":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add an independent one; the freedom is Welch's, infinite where nothing varies."""
        total = self.variance + other.variance
        pieces = [own.variance**2 / np.maximum(own.freedom, 1) for own in (self, other)]
        small = np.asarray(pieces[0] + pieces[1], dtype=np.float64)
        freedom = np.full(small.shape, np.inf)
        np.divide(total**2, small, out=freedom, where=small > 0)
        return Chance(total, freedom)

    def half_width(self) -> np.ndarray:
        """Return half of the interval's width: the standard error times Student's quantile."""
        # SciPy has no quantile of infinite freedom.
        freedom = np.minimum(self.freedom, 1e9)
        return stdtrit(freedom, 1 - _OUTSIDE) * np.sqrt(self.variance)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the interval of a mean over trainings and targets, shape (seeds, targets).

    Both could be others: all targets share the models, and what these have by chance must not look
    like an effect. What varies with both at once is counted twice, so that the interval is never
    too short for it. With one training (or target) the interval says nothing about others.

    Example:
        >>> import numpy as np
        >>> low, high = mean_interval(np.array([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]]))
        >>> print(f"{low:.2f} to {high:.2f}")
        0.08 to 4.42
    """
    seeds, targets = values.shape
    parts = [
        Chance(values.mean(axis=axis).var(ddof=int(n > 1)) / n, np.array(n - 1.0))
        for axis, n in ((1, seeds), (0, targets))
    ]
    half, mean = float((parts[0] + parts[1]).half_width()), float(values.mean())
    return mean - half, mean + half


def accuracy_interval(values: np.ndarray) -> tuple[float, float]:
    """Return that of a mean of ones and zeros, or of their differences, shape (seeds, targets).

    Where all models agree on all targets, the numbers have no spread, but other targets need not be
    so: of n that are all alike, up to 3 in n others may differ. So it is where less than one target
    differs.

    Source: Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", Journal of
        the American Medical Association 249, 1983.

    Example:
        >>> import numpy as np
        >>> low, high = accuracy_interval(np.ones((5, 100)))
        >>> print(f"{low:.2f} to {high:.2f}")
        0.97 to 1.03
    """
    low, high = mean_interval(values)
    n_targets = values.shape[1]
    unseen = 1 - (1 - CONFIDENCE) ** (1 / n_targets)
    for alike in (-1, 0, 1):
        if np.abs(values - alike).mean() < 1 / n_targets:
            low, high = min(low, alike - unseen), max(high, alike + unseen)
    return low, high


def interval(draws: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of percentile intervals along an axis; draws that are NaN don't count."""
    low, high = np.nanquantile(draws, [_OUTSIDE, 1 - _OUTSIDE], axis=axis)
    return low, high


def expanded(
    draws: np.ndarray, estimates: np.ndarray, chance: Chance
) -> tuple[np.ndarray, np.ndarray]:
    """Return percentile intervals that are as wide as a chance with little freedom makes them.

    Draws have shape (..., draws), estimates and chances (...). Ends keep their lopsidedness: the
    distances of both to the estimate are multiplied alike.
    """
    spread = np.nanstd(draws, axis=-1, ddof=1)
    wide = chance.half_width()
    factor = np.ones_like(wide)
    np.divide(wide, ndtri(1 - _OUTSIDE) * spread, out=factor, where=spread > 0)
    low, high = (estimates + (end - estimates) * factor for end in interval(draws, axis=-1))
    return low, high

"""Find the damping with which scores explain best how training moved the outputs.

The sum of a sample's scores over all training samples, weighted by their loss weights, foretells
how its output moves in the rest of the training. The end of the run shows what did happen. So each
damping can be asked how well it foretells the changes of the training samples' own outputs: no
model is trained again. Which damping is right depends on how long, and how fast, a model trains.

Samples with long gradients move far whatever the damping: texts of many words, say. What their
lengths alone foretell is taken out of both sides.

Source: docs/explanation/scores.md, "The damping"; measured by benchmarks/damping_rule.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.config.memory_needs import FORETOLD_SAMPLES
from trak_core.scoring.intervals import interval
from trak_core.scoring.solve import Spectrum

DAMPINGS = 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0
_DRAWS, _FEWEST = 200, 30
# Below this agreement the changes say nothing about a damping; a smaller gain is none. On the
# studies of benchmarks/damping_rule.py, what is below either made scores worse as often as better.
_LEAST_AGREEMENT, _LEAST_GAIN = 0.5, 0.03


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The damping that foretells best, and how far the study's own is behind it.

    ``agreement`` is the correlation of foretold and true changes, a mean over runs, with that
    damping, ``own`` that with the study's. ``low`` and ``high`` are a 95 % bootstrap interval, over
    samples, of how far ``own`` is behind.
    """

    damping: float
    agreement: float
    own: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether another damping foretells better: beyond chance, and by .03 or more."""
        return self.low > 0 and self.agreement - self.own >= _LEAST_GAIN


def foretold_samples(n_train: int) -> np.ndarray:
    """Return the row numbers of at most 2,000 training samples, evenly spaced, int64."""
    return np.unique(
        np.linspace(0, n_train - 1, min(n_train, FORETOLD_SAMPLES)).round().astype(np.int64)
    )


def foretold_changes(
    spectrum: Spectrum, weighted_sum: np.ndarray, rows: np.ndarray, mean_squared_norm: float
) -> np.ndarray:
    """Return how each damping foretells that outputs change: phi (N + ridge I)^-1 Phi^T Q.

    N = Phi^T W Phi is the normal matrix, and Q are the loss weights, whose sum with the features,
    Phi^T Q, has shape (k,). ``rows`` are features of the samples foretold, shape (s, k). A ridge is
    a damping of ``DAMPINGS`` times the mean squared norm. Changes are right up to a factor.

    Returns:
        A column for each damping, shape (s, len(DAMPINGS)), float64.
    """
    ridges = mean_squared_norm * np.array(DAMPINGS)
    along = spectrum.vectors.T @ weighted_sum
    solved = along[:, None] / np.maximum(
        spectrum.eigenvalues[:, None] + ridges, np.finfo(np.float64).tiny
    )
    return rows @ (spectrum.vectors @ solved)


@dataclass(frozen=True, slots=True)
class Foretold:
    """What a run's first checkpoint foretells of some training samples, and what did happen.

    ``changes`` are those of ``foretold_changes``, shape (s, d); ``lengths`` are of the samples'
    features, and ``happened`` is how far outputs moved by the run's end, both of shape (s,).
    """

    changes: np.ndarray
    lengths: np.ndarray
    happened: np.ndarray

    def without_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return foretold (s, d) and true (s, 1) changes less what lengths alone foretell."""
        both = np.column_stack([self.changes, self.happened]).astype(np.float64)
        known = np.column_stack([np.ones(len(both)), self.lengths])
        left = both - known @ np.linalg.lstsq(known, both, rcond=None)[0]
        return left[:, :-1], left[:, -1:]


def suggest_damping(runs: Sequence[Foretold], damping: float) -> Suggestion | None:
    """Return the damping that foretells the changes best, beside a study's own.

    ``damping`` is the study's. The order of runs and of samples doesn't count, nor do factors and
    offsets of changes. The agreement with a damping between those of ``DAMPINGS`` is interpolated
    by its logarithm.

    Returns:
        None without a run, with fewer than 30 samples, where no output changed, or if no damping
        has an agreement of .5: the changes say nothing then.
    """
    if not runs or len(runs[0].lengths) < _FEWEST or not all(np.ptp(r.happened) > 0 for r in runs):
        return None
    n = len(runs[0].lengths)
    rng = np.random.default_rng(0)
    drawn = [np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(_DRAWS)]
    # How often each draw has each sample; the first has each once.
    counts = np.stack([np.ones(n, dtype=np.int64), *drawn])
    curves = np.mean([_correlations(*run.without_lengths(), counts) for run in runs], axis=0)
    best = int(np.argmax(curves[0]))
    if curves[0, best] < _LEAST_AGREEMENT:
        return None
    place = np.log(max(damping, DAMPINGS[0]))
    own = np.array([np.interp(place, np.log(DAMPINGS), curve) for curve in curves])
    low, high = interval((curves[:, best] - own)[1:], axis=0)
    return Suggestion(
        DAMPINGS[best], float(curves[0, best]), float(own[0]), float(low), float(high)
    )


def _correlations(foretold: np.ndarray, happened: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each draw's correlation with each damping, shape (draws, d)."""
    parts = foretold, foretold**2, happened, happened**2, foretold * happened
    means = [counts @ values / len(happened) for values in parts]
    spread = (means[1] - means[0] ** 2) * (means[3] - means[2] ** 2)
    return (means[4] - means[0] * means[2]) / np.sqrt(np.maximum(spread, np.finfo(float).tiny))

"""Measure how well scores predict retraining, and how well two sets agree; NumPy only.

A *subset sum* is the sum of a target's scores over a subset of the training samples. The linear
datamodeling score (LDS) of a target is the Spearman correlation, over subsets, between the outputs
of models retrained on them and the subset sums.

Source: Ilyas et al., "Datamodels", ICML 2022; Park et al., "TRAK", ICML 2023, section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.errors import InputError


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Columns of numbers, sorted once, to be ranked for any resample of their rows.

    Each array has shape (rows, columns): row numbers, smallest value first; and where the values
    equal to a row's begin and end in that order.
    """

    order: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    @classmethod
    def sort(cls, values: np.ndarray) -> "_Sorted":
        order = np.argsort(values, axis=0, kind="stable")
        ascending = np.take_along_axis(values, order, axis=0)
        positions = np.arange(len(values))[:, None]
        new = np.vstack([np.ones((1, values.shape[1]), bool), ascending[1:] > ascending[:-1]])
        first = np.maximum.accumulate(np.where(new, positions, 0), axis=0)
        last = np.vstack([new[1:], np.ones((1, values.shape[1]), bool)])
        stop = np.where(last, positions + 1, len(values))
        stop = np.minimum.accumulate(stop[::-1], axis=0)[::-1]
        back = np.argsort(order, axis=0, kind="stable")
        return cls(order, *(np.take_along_axis(ends, back, axis=0) for ends in (first, stop)))

    def centred_ranks(self, counts: np.ndarray) -> np.ndarray:
        """Return ranks less their mean, equal values sharing theirs, of row i ``counts[i]`` times.

        Ranks and their mean are halves of integers: nothing is rounded.
        """
        below = np.zeros((len(counts) + 1, self.order.shape[1]))
        np.cumsum(counts[self.order], axis=0, out=below[1:])
        ranks = np.take_along_axis(below, self.first, axis=0)
        ranks += np.take_along_axis(below, self.stop, axis=0)
        return (ranks - counts.sum()) / 2


def _correlations(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return Pearson correlations of centred columns whose rows count so many times."""
    weighted = a * counts[:, None]
    sizes = np.einsum("ij,ij->j", weighted, a) * np.einsum("ij,i,ij->j", b, counts, b)
    products = np.einsum("ij,ij->j", weighted, b)
    return np.divide(products, np.sqrt(sizes), out=np.zeros_like(products), where=sizes > 0)


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each column of ``a`` with the same column of ``b``.

    Equivalent to ``scipy.stats.spearmanr`` of each pair of columns, except that a constant column
    has correlation 0, because it orders nothing. Equal values share the mean of their ranks. Both
    have shape (rows, columns) and finite values; the result has shape (columns,), float64.

    Example:
        >>> import numpy as np
        >>> scores = np.array([[0.1, 2.0], [0.2, 3.0], [0.4, 1.0]])
        >>> outputs = np.array([[1.0, 7.0], [2.0, 8.0], [9.0, 9.0]])
        >>> rank_correlations(scores, outputs)
        array([ 1. , -0.5])
    """
    counts = np.ones(len(a))
    ranks = [_Sorted.sort(x).centred_ranks(counts) for x in (a, b)]
    return _correlations(ranks[0], ranks[1], counts)


def reliability(outputs: np.ndarray) -> np.ndarray:
    """Return how alike models retrained with other seeds would order the subsets.

    The mean Spearman correlation rho between two of r seeds, over all pairs, becomes that of means
    over r seeds by Spearman and Brown's formula: r rho / (1 + (r - 1) rho). Outputs have shape
    (seeds, subsets, targets), with two seeds or more.

    Returns:
        Shape (targets,), from 0 (also in place of a negative value) to 1.

    Source: Brown, "Some experimental results in the correlation of mental abilities", British
        Journal of Psychology 3, 1910; Spearman, in the same volume.
    """
    return _reliability([_Sorted.sort(seed) for seed in outputs], np.ones(outputs.shape[1]))


def _reliability(seeds: Sequence[_Sorted], counts: np.ndarray) -> np.ndarray:
    n_seeds = len(seeds)
    if n_seeds < 2:
        raise InputError(
            "Reliability needs models retrained with at least two seeds on each subset. Found "
            f"{n_seeds}.",
            code="evaluation.seeds",
        )
    ranks = [seed.centred_ranks(counts) for seed in seeds]
    pairs = [(i, j) for i in range(n_seeds) for j in range(i)]
    rho = sum(_correlations(ranks[i], ranks[j], counts) for i, j in pairs) / len(pairs)
    rho = np.maximum(rho, 0)
    return n_seeds * rho / (1 + (n_seeds - 1) * rho)


def noise_ceiling(outputs: np.ndarray) -> np.ndarray:
    """Return the correlation that expectations would have with the outputs, sqrt(reliability).

    A perfect prediction of the mean output over all seeds reaches it, where the outputs that it is
    compared with are means over a few seeds. See ``reliability`` for shapes.

    Source: Spearman, "The proof and measurement of association between two things", American
        Journal of Psychology 15, 1904 (the correction for attenuation).
    """
    return np.sqrt(reliability(outputs))


def bootstrap(
    predictions: Sequence[np.ndarray], outputs: np.ndarray, *, n_draws: int = 1000, seed: int = 0
) -> np.ndarray:
    """Return mean rank correlations of resampled subsets and targets.

    Each draw takes as many subsets and as many targets as there are, with replacement, ranks the
    drawn subsets anew and averages over the drawn targets. All predictions share the draws, so that
    a prediction's numbers don't depend on the others, and differences between two are paired.

    Predictions are subset sums, each of shape (subsets, targets). Outputs of retrained models have
    shape (seeds, subsets, targets); seeds are averaged.

    Returns:
        Shape (n_draws, predictions) and, with two seeds or more, one more column for the noise
        ceiling.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    rng = np.random.default_rng(seed)
    n_subsets, n_targets = outputs.shape[1:]
    truth = _Sorted.sort(outputs.mean(axis=0))
    columns = [_Sorted.sort(sums) for sums in predictions]
    seeds = [_Sorted.sort(seed_outputs) for seed_outputs in outputs] if len(outputs) > 1 else []
    means = np.empty((n_draws, len(columns) + bool(seeds)))
    for draw in range(n_draws):
        counts = np.bincount(rng.integers(n_subsets, size=n_subsets), minlength=n_subsets) * 1.0
        targets = np.bincount(rng.integers(n_targets, size=n_targets), minlength=n_targets)
        ranks = truth.centred_ranks(counts)
        each = [_correlations(own.centred_ranks(counts), ranks, counts) for own in columns]
        if seeds:
            each.append(np.sqrt(_reliability(seeds, counts)))
        means[draw] = np.array(each) @ targets / n_targets
    return means


def percentiles(drawn: np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Return the ends of intervals that hold this part of bootstrap's draws, shape (columns, 2)."""
    outside = (1 - confidence) / 2
    return np.quantile(drawn, [outside, 1 - outside], axis=0).T


def auc(values: np.ndarray, positive: np.ndarray) -> float:
    """Return the chance that a positive sample has a larger value than another, ties counting half.

    Equivalent to ``sklearn.metrics.roc_auc_score(positive, values)``, of finite values and booleans
    of shape (n,); it refuses samples that are all positive, or none of them.

    Source: Mann and Whitney, Annals of Mathematical Statistics 18, 1947.
    """
    n_positive, n_other = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_other:
        raise InputError(
            "An AUC compares positive samples with others: there must be both. Found "
            f"{n_positive} positive ones of {len(positive)}.",
            code="evaluation.auc_classes",
        )
    ranks = _Sorted.sort(values[:, None]).centred_ranks(np.ones(len(values)))[:, 0]
    return float(0.5 + ranks[positive].sum() / (n_positive * n_other))

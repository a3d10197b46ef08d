"""Compute linear datamodeling scores (LDS): how well scores predict retrained models.

A *subset sum* is the sum of a target's scores over a subset of the training samples. The LDS of a
target is the Spearman correlation, over subsets, between the subset sums and the outputs of models
that were retrained on the subsets.

Source: Ilyas et al., "Datamodels", ICML 2022; Park et al., "TRAK", ICML 2023, section 2.2.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from trak_core.errors import InputError
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.subset_sums import Key
from trak_core.settings import Setting


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The sort order of each column of a matrix, from which ranks in any resample are computed.

    All arrays have shape (rows, columns). ``order`` contains the row numbers of each column in
    ascending order of the values. In this order, the values equal to the value in row i are at the
    positions from ``first[i]`` to ``stop[i] - 1``.
    """

    order: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    @classmethod
    def sort(cls, values: np.ndarray) -> "_Sorted":
        first, stop = (rankdata(values, end, axis=0).astype(np.int64) for end in ("min", "max"))
        return cls(np.argsort(values, axis=0, kind="stable"), first - 1, stop)

    def centred_ranks(self, counts: np.ndarray) -> np.ndarray:
        """Return the ranks of values in a resample of the rows, minus the mean rank.

        The resample contains row i ``counts[i]`` times. Equal values get the mean of their ranks.
        The results are exact, because all ranks are multiples of 1/2.
        """
        # If n_1 values are smaller than x, and n_2 values are smaller than or equal to x, the rank
        # of x is (n_1 + n_2 + 1) / 2. The mean rank is (n + 1) / 2.
        below = np.zeros((len(counts) + 1, self.order.shape[1]))
        np.cumsum(counts[self.order], axis=0, out=below[1:])
        ranks = np.take_along_axis(below, self.first, axis=0)
        ranks += np.take_along_axis(below, self.stop, axis=0)
        return (ranks - counts.sum()) / 2


def _correlations(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the Pearson correlation of each column of ``a`` with the same column of ``b``.

    Row i counts ``counts[i]`` times. With these counts, every column must have the mean 0.
    """
    # The correlation is sum_i n_i a_i b_i / sqrt(sum_i n_i a_i^2 sum_i n_i b_i^2) for counts n_i.
    weighted = a * counts[:, None]
    sizes = np.einsum("ij,ij->j", weighted, a) * np.einsum("ij,i,ij->j", b, counts, b)
    products = np.einsum("ij,ij->j", weighted, b)
    return np.divide(products, np.sqrt(sizes), out=np.zeros_like(products), where=sizes > 0)


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each column of ``a`` with the same column of ``b``.

    Both arrays have shape (rows, columns) and finite values. The result has shape (columns,),
    float64, and equals ``scipy.stats.spearmanr`` of each pair of columns, except that the
    correlation of a constant column is 0 instead of NaN.
    """
    counts = np.ones(len(a))
    ranks = [_Sorted.sort(x).centred_ranks(counts) for x in (a, b)]
    return _correlations(ranks[0], ranks[1], counts)


def noise_ceiling(outputs: np.ndarray) -> np.ndarray:
    """Return the LDS that perfect predictions would have, shape (targets,).

    The LDS of perfect predictions is below 1, because outputs of retrained models depend on their
    seeds. ``outputs`` have shape (seeds, subsets, targets), with r >= 2 seeds. Let rho be the mean
    Spearman correlation between the outputs of two seeds, or 0 if the mean is negative. By the
    formula of Spearman and Brown, the mean output over seeds has the reliability
    r rho / (1 + (r - 1) rho). The noise ceiling is the square root of this reliability.

    Source: Spearman, "The proof and measurement of association between two things", American
        Journal of Psychology 15, 1904 (the correction for attenuation); Brown, "Some experimental
        results in the correlation of mental abilities", British Journal of Psychology 3, 1910.
    """
    return _ceiling([_Sorted.sort(seed) for seed in outputs], np.ones(outputs.shape[1]))


def _ceiling(seeds: Sequence[_Sorted], counts: np.ndarray) -> np.ndarray:
    r, ranks = len(seeds), [seed.centred_ranks(counts) for seed in seeds]
    pairs = [_correlations(*pair, counts) for pair in combinations(ranks, 2)]
    rho = np.maximum(np.mean(pairs, axis=0), 0)
    return np.sqrt(r * rho / (1 + (r - 1) * rho))


def bootstrap(
    predictions: Sequence[np.ndarray], outputs: np.ndarray, *, n_draws: int = 1000, seed: int = 0
) -> np.ndarray:
    """Return bootstrap draws of the LDS of each prediction.

    Each draw resamples subsets and targets with replacement, and averages the rank correlations
    over the drawn targets. All predictions use the same draws, so two predictions can be compared
    within each draw.

    Args:
        predictions: Sums of scores over the subsets, each of shape (subsets, targets).
        outputs: Outputs of retrained models, shape (seeds, subsets, targets). Predictions are
            compared with the mean over seeds.
        n_draws: The number of draws.
        seed: The seed of the random generator.

    Returns:
        The LDS in each draw, shape (n_draws, predictions). If there are at least two seeds, a
        further column at the end contains the noise ceiling.

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
        each = [_correlations(column.centred_ranks(counts), ranks, counts) for column in columns]
        if seeds:
            each.append(_ceiling(seeds, counts))
        means[draw] = np.array(each) @ targets / n_targets
    return means


# A matrix, the names of its rows, and the names of its columns.
Frame = tuple[np.ndarray, list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Outputs of retrained models, ordered like the training samples and targets of a scores file.

    Attributes:
        masks: 1 if a subset contains a training sample, else 0, shape (subsets, n), float64.
        outputs: The model output for each of m targets, shape (seeds, subsets, m), float64.
        source: The content hash of each file of retrained models.
    """

    masks: np.ndarray
    outputs: np.ndarray
    source: list[str]


def order_models(
    masks: Frame, outputs: Frame, train_ids: Sequence[Any], target_ids: Sequence[Any], name: object
) -> tuple[np.ndarray, np.ndarray]:
    """Check the two tables in a file of retrained models, and order them like a scores file.

    Rows of ``masks`` are subsets, columns are training samples, and values are 0 or 1. Rows of
    ``outputs`` are models, each named after its subset, and columns are samples, including the
    targets. All subsets must have the same number of models. Error messages begin with ``name``.

    Returns:
        Masks of shape (subsets, n) with columns in the order of the n ``train_ids``, and outputs of
        shape (seeds, subsets, m) in the order of the m ``target_ids``, both float64.
    """
    chosen = _columns(masks, train_ids, f"{name}: the columns of `masks`", has_others=False)
    values = _columns(outputs, target_ids, f"{name}: the columns of `outputs`", has_others=True)
    if not np.isin(chosen, (0, 1)).all():
        raise InputError(
            f"{name}: `masks` must contain only 0 and 1. Its largest value is {chosen.max():g}.",
            code="evaluation.retrained_models",
        )
    subsets, models = masks[1], Counter(outputs[1])
    unknown = models.keys() - set(subsets)
    counts = {models[subset] for subset in subsets}
    if len(set(subsets)) < len(subsets) or unknown or len(counts) > 1 or 0 in counts:
        raise InputError(
            f"{name}: `masks` must have one row for each subset, and `outputs` must have equally "
            f"many models for each of these subsets. `masks` has {len(subsets)} rows for "
            f"{len(set(subsets))} subsets, with {min(counts, default=0)} to "
            f"{max(counts, default=0)} models each. Subsets in `outputs` but not in `masks`: "
            f"{', '.join(map(repr, list(unknown)[:4])) or 'none'}.",
            code="evaluation.retrained_models",
        )
    # A stable sort groups the models by subset without changing the order of a subset's models.
    place = {subset: row for row, subset in enumerate(subsets)}
    order = np.argsort([place[subset] for subset in outputs[1]], kind="stable")
    by_subset = values[order].reshape(len(subsets), -1, len(target_ids))
    return chosen, np.ascontiguousarray(by_subset.swapaxes(0, 1))


def _columns(frame: Frame, ids: Sequence[Any], where: str, *, has_others: bool) -> np.ndarray:
    """Return the columns ``ids``, float64. Other columns are an error unless ``has_others``."""
    values, _, columns = frame
    position = {column: i for i, column in enumerate(columns)}
    missing, others = [i for i in ids if i not in position], position.keys() - set(ids)
    if missing or len(position) < len(columns) or (others and not has_others):
        lists = [", ".join(map(str, [*some][:4])) or "none" for some in (missing, others)]
        raise InputError(
            f"{where} must be named by the ids of the study, each id once. Found "
            f"{len(columns)} columns. Missing ids: {lists[0]}. Other columns: {lists[1]}.",
            code="evaluation.retrained_models",
        )
    return values[:, [position[i] for i in ids]].astype(np.float64)


def curve_counts(n_checkpoints: int) -> list[int]:
    """Return the numbers of checkpoints for which the LDS is computed: 1, 2, 3, 5, 10, ..."""
    steps = [digit * 10**power for power in range(4) for digit in (1, 2, 3, 5)]
    return [count for count in steps if count < n_checkpoints] + [n_checkpoints]


def lds_tables(
    methods: Mapping[Key, np.ndarray],
    by_count: Mapping[int, np.ndarray],
    truth: GroundTruth,
    target_ids: list[Any],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary``, ``targets`` and ``checkpoints`` of an evaluation.

    ``summary`` contains the LDS of each method, ``targets`` the correlation of each method for each
    target, and ``checkpoints`` the LDS of scores from fewer checkpoints. ``methods`` contains the
    subset sums of each method, shape (subsets, targets). The first method is the scores, with which
    the others are compared. ``by_count[c]`` contains the subset sums of scores from the first c
    checkpoints.
    """
    mean = truth.outputs.mean(axis=0)
    correlations = {key: rank_correlations(sums, mean) for key, sums in methods.items()}
    drawn = bootstrap([*methods.values(), *by_count.values()], truth.outputs)
    rows = list(range(len(methods)))
    # Without differences between seeds, the ceiling would be 1, though its error is unknown.
    if len(truth.outputs) > 1 and np.ptp(truth.outputs, axis=0).any():
        correlations["noise_ceiling", "ceiling", 0] = noise_ceiling(truth.outputs)
        rows.append(-1)
    low, high = interval(drawn, axis=0)
    # The first column contains the scores. The difference between the scores and each method is
    # computed within each draw, so that the errors they have in common cancel.
    behind_low, behind_high = interval(drawn[:, :1] - drawn[:, rows], axis=0)
    lds = np.array([each.mean() for each in correlations.values()])
    summary = pd.DataFrame(list(correlations), columns=["method", "kind", "proj_dim"])
    summary["lds"], summary["low"], summary["high"] = lds, low[rows], high[rows]
    summary["behind"] = lds[0] - lds
    summary["behind_low"], summary["behind_high"] = behind_low, behind_high
    targets = pd.DataFrame(
        [
            (name, dim, target, correlation)
            for (name, _, dim), each in correlations.items()
            for target, correlation in zip(target_ids, each, strict=True)
        ],
        columns=["method", "proj_dim", "target_id", "correlation"],
    )
    of_counts = slice(len(methods), len(methods) + len(by_count))
    curve = pd.DataFrame({
        "n_checkpoints": list(by_count),
        "lds": [rank_correlations(sums, mean).mean() for sums in by_count.values()],
        "low": low[of_counts],
        "high": high[of_counts],
    })
    return summary, targets, curve


def sweep_tables(
    swept: Mapping[Setting, np.ndarray], configured: Setting, truth: GroundTruth
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``sweep`` and ``best`` of an evaluation.

    ``sweep`` contains the LDS of each setting in ``swept``, a mapping of settings to subset sums.
    The best setting is chosen by its LDS on half of the targets. ``best`` contains the LDS of this
    setting and of the setting in the config, ``configured``, on the other half of the targets. If
    there is only one target, it is used both to choose and to report.
    """
    mean = truth.outputs.mean(axis=0)
    choosing = slice(0, None, 2)
    reporting = slice(1, None, 2) if mean.shape[1] > 1 else slice(None)
    correlations = [rank_correlations(sums, mean) for sums in swept.values()]
    sweep = pd.DataFrame([asdict(setting) for setting in swept])
    sweep["lds_chosen_by"] = [each[choosing].mean() for each in correlations]
    sweep["lds_reported"] = [each[reporting].mean() for each in correlations]
    sweep["lds"] = [each.mean() for each in correlations]
    settings = list(swept)
    shown = [int(sweep["lds_chosen_by"].argmax()), settings.index(configured)]
    sums = [swept[settings[row]][:, reporting] for row in shown]
    low, high = interval(bootstrap(sums, truth.outputs[:, :, reporting]), axis=0)
    best = sweep.iloc[shown].drop(columns="lds")
    best.insert(0, "setting", ["best", "config"])
    best["low"], best["high"] = low[:2], high[:2]
    return sweep, best.reset_index(drop=True)

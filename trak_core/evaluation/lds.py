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
    """Columns that are sorted once, so that any resample of their rows can be ranked.

    All arrays have shape (rows, columns). ``order`` contains the row numbers in ascending order of
    the values. In this order, all values that are equal to the value of row i have the positions
    from ``first[i]`` to ``stop[i]`` (excluded).
    """

    order: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    @classmethod
    def sort(cls, values: np.ndarray) -> "_Sorted":
        first, stop = (rankdata(values, end, axis=0).astype(np.int64) for end in ("min", "max"))
        return cls(np.argsort(values, axis=0, kind="stable"), first - 1, stop)

    def centred_ranks(self, counts: np.ndarray) -> np.ndarray:
        """Return ranks minus their mean in a resample that contains row i ``counts[i]`` times.

        Equal values share the mean of their ranks. Ranks and their mean are halves of integers, so
        nothing is rounded.
        """
        # With ties, the rank of x is (n_smaller + n_smaller_or_equal + 1) / 2, with the numbers of
        # values < x and <= x. The mean rank is (n + 1) / 2.
        below = np.zeros((len(counts) + 1, self.order.shape[1]))
        np.cumsum(counts[self.order], axis=0, out=below[1:])
        ranks = np.take_along_axis(below, self.first, axis=0)
        ranks += np.take_along_axis(below, self.stop, axis=0)
        return (ranks - counts.sum()) / 2


def _correlations(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return Pearson correlations of centred columns, with row i counted ``counts[i]`` times."""
    # sum_i n_i a_i b_i / sqrt(sum_i n_i a_i^2 sum_i n_i b_i^2), with counts n_i
    weighted = a * counts[:, None]
    sizes = np.einsum("ij,ij->j", weighted, a) * np.einsum("ij,i,ij->j", b, counts, b)
    products = np.einsum("ij,ij->j", weighted, b)
    return np.divide(products, np.sqrt(sizes), out=np.zeros_like(products), where=sizes > 0)


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each column of ``a`` with the same column of ``b``.

    Equivalent to ``scipy.stats.spearmanr`` of each pair of columns, except that a constant column
    has correlation 0, because it defines no order. Equal values share the mean of their ranks. Both
    arrays have shape (rows, columns) and finite values. The result has shape (columns,), float64.
    """
    counts = np.ones(len(a))
    ranks = [_Sorted.sort(x).centred_ranks(counts) for x in (a, b)]
    return _correlations(ranks[0], ranks[1], counts)


def noise_ceiling(outputs: np.ndarray) -> np.ndarray:
    """Return the LDS of a perfect prediction of the expected outputs, shape (targets,).

    Outputs are noisy, because they are means over r seeds. Let rho be the mean Spearman correlation
    between two seeds. The reliability of the mean is r rho / (1 + (r - 1) rho), by the formula of
    Spearman and Brown, and the ceiling is its square root. A negative rho is replaced by 0.

    Outputs have shape (seeds, subsets, targets), with at least two seeds.

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
    """Return mean rank correlations for resampled subsets and targets.

    Each draw resamples subsets and targets with replacement, ranks the drawn subsets again and
    averages over the drawn targets. All predictions use the same draws, so differences between two
    predictions are paired. Predictions are subset sums, each of shape (subsets, targets). They are
    compared with the mean over seeds of ``outputs``, shape (seeds, subsets, targets).

    Returns:
        Shape (n_draws, predictions). With at least two seeds, the last of (predictions + 1) columns
        is the noise ceiling.

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


# A matrix, the names of its rows and the names of its columns.
Frame = tuple[np.ndarray, list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Outputs of retrained models, with samples and targets in the order of a scores file.

    Attributes:
        masks: 1 if a subset contains a training sample, else 0, shape (subsets, n), float64.
        outputs: f of the models, shape (seeds, subsets, m), float64.
        source: The content hash of each file of retrained models.
    """

    masks: np.ndarray
    outputs: np.ndarray
    source: list[str]


def order_models(
    masks: Frame, outputs: Frame, train_ids: Sequence[Any], target_ids: Sequence[Any], name: object
) -> tuple[np.ndarray, np.ndarray]:
    """Return a file's subsets and model outputs in the order of the study's samples and targets.

    Rows of ``masks`` are subsets, columns are training samples, and values are 0 or 1. Rows of
    ``outputs`` are models, each named after its subset, and columns are samples, including the
    targets. All subsets must have the same number of models. Error messages contain ``name``.

    Returns:
        Masks of shape (S, n) and outputs of shape (seeds, S, m), float64.
    """
    chosen = _columns(masks, train_ids, f"{name}: the columns of `masks`", has_others=False)
    values = _columns(outputs, target_ids, f"{name}: the columns of `outputs`", has_others=True)
    if not np.isin(chosen, (0, 1)).all():
        raise InputError(
            f"{name}: `masks` must contain only 0 and 1. Found {chosen.max():g}.",
            code="evaluation.retrained_models",
        )
    subsets, models = masks[1], Counter(outputs[1])
    unknown = models.keys() - set(subsets)
    counts = {models[subset] for subset in subsets}
    if len(set(subsets)) < len(subsets) or unknown or len(counts) > 1 or 0 in counts:
        raise InputError(
            f"{name}: `masks` must have one row for each subset, and `outputs` the same number of "
            f"models for each of these subsets. Found {len(subsets)} rows of {len(set(subsets))} "
            f"subsets, with {min(counts, default=0)} to {max(counts, default=0)} models each. "
            f"Other subsets in `outputs`: {', '.join(map(repr, list(unknown)[:4])) or 'none'}.",
            code="evaluation.retrained_models",
        )
    # A stable sort groups the rows of `outputs` by subset, and keeps the order of its models.
    place = {subset: row for row, subset in enumerate(subsets)}
    order = np.argsort([place[subset] for subset in outputs[1]], kind="stable")
    by_subset = values[order].reshape(len(subsets), -1, len(target_ids))
    return chosen, np.ascontiguousarray(by_subset.swapaxes(0, 1))


def _columns(frame: Frame, ids: Sequence[Any], where: str, *, has_others: bool) -> np.ndarray:
    """Return the columns with these ids, float64. Other columns are allowed if ``has_others``."""
    values, _, columns = frame
    position = {column: i for i, column in enumerate(columns)}
    missing, others = [i for i in ids if i not in position], position.keys() - set(ids)
    if missing or len(position) < len(columns) or (others and not has_others):
        lists = [", ".join(map(str, [*some][:4])) or "none" for some in (missing, others)]
        raise InputError(
            f"{where} must be the study's ids, without repeats. Found {len(columns)} columns. "
            f"Missing: {lists[0]}. Other columns: {lists[1]}.",
            code="evaluation.retrained_models",
        )
    return values[:, [position[i] for i in ids]].astype(np.float64)


def curve_counts(n_checkpoints: int) -> list[int]:
    """Return 1, 2, 3, 5, 10, 20, 30, 50, ... below ``n_checkpoints``, then ``n_checkpoints``."""
    steps = [digit * 10**power for power in range(4) for digit in (1, 2, 3, 5)]
    return [count for count in steps if count < n_checkpoints] + [n_checkpoints]


def lds_tables(
    methods: Mapping[Key, np.ndarray],
    by_count: Mapping[int, np.ndarray],
    truth: GroundTruth,
    target_ids: list[Any],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary``, ``targets`` and ``checkpoints``.

    ``methods`` contains the subset sums, shape (S, m), for each row of the summary. The first row
    is for the scores. ``by_count[c]`` is the subset sums of scores from the first c checkpoints.
    """
    mean = truth.outputs.mean(axis=0)
    correlations = {key: rank_correlations(sums, mean) for key, sums in methods.items()}
    drawn = bootstrap([*methods.values(), *by_count.values()], truth.outputs)
    rows = list(range(len(methods)))
    if len(truth.outputs) > 1:
        correlations["noise_ceiling", "ceiling", 0] = noise_ceiling(truth.outputs)
        rows.append(-1)
    low, high = interval(drawn, axis=0)
    # A difference from the scores, which are the first column, is taken within each draw.
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
    """Return the tables ``sweep`` and ``best``, from the subset sums of each setting.

    Half of the targets are used to choose the best setting. The LDS of this setting and of the
    setting in the config (``configured``) are reported for the other half. A single target is used
    for both.
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

"""Linear datamodeling scores (LDS): how well subset sums predict retrained models, as tables.

A *subset sum* is the sum of a target's scores over a subset of the training samples. The LDS of a
target is the Spearman correlation, over subsets, between the outputs of models retrained on them
and the subset sums.

Source: Ilyas et al., "Datamodels", ICML 2022; Park et al., "TRAK", ICML 2023, section 2.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from trak_core.errors import InputError
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.subset_sums import Key
from trak_core.spec import Setting


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


# A matrix with the names of its rows and of its columns.
Frame = tuple[np.ndarray, list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Retrained models in the order of a scores file's samples and targets.

    Attributes:
        masks: 1 where a subset has a training sample, shape (subsets, n), float64.
        outputs: f of the models, shape (seeds, subsets, m), float64.
        source: Hashes of the files' content.
    """

    masks: np.ndarray
    outputs: np.ndarray
    source: list[str]


def order_models(
    masks: Frame, outputs: Frame, train_ids: Sequence[Any], target_ids: Sequence[Any], name: object
) -> tuple[np.ndarray, np.ndarray]:
    """Put a file's subsets and retrained models in the order of the study's samples.

    Masks are 0 and 1; rows are subsets, columns are training samples. Rows of outputs f are models,
    each named by its subset; columns are targets and others. A file that is about other samples, or
    has not as many models of each subset, is refused by its ``name``.

    Returns:
        Masks of shape (S, n) and outputs of shape (seeds, S, m), float64.
    """
    subsets, of_models = masks[1], outputs[1]
    extra = set(masks[2]) - set(train_ids)
    if extra:
        raise InputError(
            f"{name}: the columns of `masks` must be the training samples of the study. Found "
            f"others, such as {sorted(map(str, extra))[0]}."
        )
    chosen = _columns(masks, train_ids, name, "masks")
    values = _columns(outputs, target_ids, name, "outputs")
    if not np.isin(chosen, (0, 1)).all():
        raise InputError(f"{name}: `masks` must hold 0 and 1 only. Found {chosen.max():g}.")
    rows = {subset: [] for subset in subsets}
    for row, subset in enumerate(of_models):
        if subset not in rows:
            raise InputError(
                f"{name}: every row of `outputs` must be named by its subset, a row of `masks`. "
                f"Found {subset!r}, which is none."
            )
        rows[subset].append(row)
    counts = {len(models) for models in rows.values()}
    if len(rows) < len(subsets) or len(counts) > 1 or 0 in counts:
        raise InputError(
            f"{name}: `masks` must have each subset once, and `outputs` as many models of one as "
            f"of any other. Found {len(subsets)} rows of {len(rows)} subsets, with "
            f"{min(counts, default=0)} to {max(counts, default=0)} models each."
        )
    return chosen, np.stack([values[rows[subset]] for subset in subsets], axis=1)


def _columns(frame: Frame, ids: Sequence[Any], name: object, key: str) -> np.ndarray:
    """Return a frame's columns of these ids, float64."""
    values, _, columns = frame
    position = {column: i for i, column in enumerate(columns)}
    missing = [i for i in ids if i not in position]
    if missing or len(position) < len(columns):
        raise InputError(
            f"{name}: the columns of `{key}` must be the study's ids, each once. Found "
            f"{len(columns)} columns, such as {columns[0] if columns else 'none'!r}, and no "
            f"{', '.join(map(str, missing[:4]))}."
        )
    return values[:, [position[i] for i in ids]].astype(np.float64)


def curve_counts(n_checkpoints: int) -> list[int]:
    """Return 1, 2, 3, 5, 10, 20, 30, 50, 100, ... below a number of checkpoints, and it."""
    steps = [digit * 10**power for power in range(4) for digit in (1, 2, 3, 5)]
    return [count for count in steps if count < n_checkpoints] + [n_checkpoints]


def lds_tables(
    methods: Mapping[Key, np.ndarray],
    by_count: Mapping[int, np.ndarray],
    truth: GroundTruth,
    target_ids: list[Any],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return ``summary``, ``targets`` and ``checkpoints``, bootstrapped on the same draws.

    Methods are subset sums of each row of the summary, the scores' first; ``by_count`` those of the
    scores, by the number of checkpoints.
    """
    mean = truth.outputs.mean(axis=0)
    each = {key: rank_correlations(sums, mean) for key, sums in methods.items()}
    drawn = bootstrap([*methods.values(), *by_count.values()], truth.outputs)
    rows = list(range(len(methods)))
    if len(truth.outputs) > 1:
        each["noise_ceiling", "ceiling", 0] = noise_ceiling(truth.outputs)
        rows.append(-1)
    low, high = interval(drawn, axis=0)
    # Paired: both of a difference come from the same draws. The scores are the first row.
    behind_low, behind_high = interval(drawn[:, :1] - drawn[:, rows], axis=0)
    lds = np.array([correlations.mean() for correlations in each.values()])
    summary = pd.DataFrame({
        "method": [name for name, _, _ in each],
        "kind": [kind for _, kind, _ in each],
        "proj_dim": [dim for _, _, dim in each],
        "lds": lds,
        "low": low[rows],
        "high": high[rows],
        "behind": lds[0] - lds,
        "behind_low": behind_low,
        "behind_high": behind_high,
    })
    targets = pd.DataFrame(
        [
            (name, dim, target, correlation)
            for (name, _, dim), correlations in each.items()
            for target, correlation in zip(target_ids, correlations, strict=True)
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
    swept: Mapping[Setting, np.ndarray], own: Setting, truth: GroundTruth
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``sweep`` and ``best``, from subset sums of each setting.

    The best setting is chosen on every other target and reported on the others, beside the study's
    own setting. A single target is both.
    """
    mean = truth.outputs.mean(axis=0)
    choosing = slice(0, None, 2)
    reporting = slice(1, None, 2) if mean.shape[1] > 1 else slice(None)
    each = [rank_correlations(sums, mean) for sums in swept.values()]
    sweep = pd.DataFrame([asdict(setting) for setting in swept])
    sweep["lds_chosen_by"] = [correlations[choosing].mean() for correlations in each]
    sweep["lds_reported"] = [correlations[reporting].mean() for correlations in each]
    sweep["lds"] = [correlations.mean() for correlations in each]
    settings = list(swept)
    shown = [int(sweep["lds_chosen_by"].argmax()), settings.index(own)]
    sums = [swept[settings[row]][:, reporting] for row in shown]
    low, high = interval(bootstrap(sums, truth.outputs[:, :, reporting]), axis=0)
    best = sweep.iloc[shown].drop(columns="lds")
    best.insert(0, "setting", ["best", "config"])
    best["low"], best["high"] = low[:2], high[:2]
    return sweep, best.reset_index(drop=True)

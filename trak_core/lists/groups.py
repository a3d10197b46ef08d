"""Sum scores over groups of training samples, with bootstrap confidence intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trak_core.attribution.fitted_checkpoint import Part, ReadRows
from trak_core.attribution.score_formulas import powered
from trak_core.config.memory_needs import GroupsNeed
from trak_core.errors import InputError
from trak_core.evaluation.intervals import Variances, rescaled_intervals
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import Combine, ScoresSpec

# The bootstrap draws the runs 100 times, and for each of these draws, the samples 10 times.
RUN_DRAWS, SAMPLE_DRAWS = 100, 10
N_DRAWS = RUN_DRAWS * SAMPLE_DRAWS
_MAX_GROUPS = 100
# Training samples have these columns in every study, so they can always be grouped by them.
_TABLE_COLUMNS = ("label", "prediction")


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of samples, each of which contains all samples with the same value in a column.

    ``names`` contains the values as texts, in sorted order. ``numbers`` contains, for each sample,
    the index of its group in ``names``, shape (n,).
    """

    column: str
    names: Sequence[str]
    numbers: np.ndarray

    @classmethod
    def of(cls, column: str, values: Iterable[Any]) -> "Grouping":
        """Group samples by the values of a column, at most 100 different texts or integers."""
        array = np.asarray(pd.Series(list(values)))
        if array.dtype.kind == "f":
            raise InputError(
                f"`groups`: the column {column} must contain texts or integers. Found the number "
                f"{array[0]:g}. Let the study return a column of ranges, such as 'under 10'.",
                code="scoring.group_values",
            )
        names, numbers = np.unique(array, return_inverse=True)
        if len(names) > _MAX_GROUPS:
            raise InputError(
                f"`groups`: the column {column} must have at most {_MAX_GROUPS} different values. "
                f"Found {len(names)}, such as {names[0]}. Use a column with fewer values.",
                code="scoring.many_groups",
            )
        return cls(column, [str(name) for name in names], numbers)


def check_groups(group_by: Iterable[str], study_columns: pd.DataFrame) -> None:
    """Raise an error if training samples cannot be grouped by one of the columns ``group_by``.

    ``study_columns`` are the columns that the study's train_columns() returns.
    """
    for name in group_by:
        if name in study_columns:
            Grouping.of(name, study_columns[name])
        elif name not in _TABLE_COLUMNS:
            known = ", ".join([*_TABLE_COLUMNS, *study_columns])
            raise InputError(
                f"`groups` must name columns of the training samples: {known}. Found {name}. To "
                "add a column, return it from the study's train_columns().",
                code="scoring.no_group_column",
            )


def run_weights(runs: Sequence[int]) -> np.ndarray:
    """Return the weights of C checkpoints in bootstrap draws of runs, shape (RUN_DRAWS + 1, C).

    Runs are drawn with replacement. The weight of a checkpoint is the number of times that its run
    is drawn. All weights in the first row are 1, which gives scores without resampling. ``runs``
    contains, for each checkpoint, the number of its run, starting from 0.
    """
    n_runs = max(runs) + 1
    draws = np.random.default_rng(0).multinomial(n_runs, np.full(n_runs, 1 / n_runs), RUN_DRAWS)
    return np.vstack([np.ones(n_runs), draws])[:, list(runs)]


class GroupSums:
    """Sums of scores over the samples of each group, accumulated over blocks of samples.

    For m targets, ``plain`` contains the sums, shape (groups, m), and ``drawn`` the sums in each
    bootstrap draw, shape (groups, draws, m). In a draw, each sample has a random weight from a
    Poisson distribution with mean 1, which is used for all targets and runs. All groups use the
    same draws of runs, so two groups can be compared within each draw. Blocks must be added in the
    order of the samples. The size of blocks does not change the sums, except for rounding.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 6; Hanley and
        MacGibbon, "Creating non-parametric bootstrap samples using Poisson frequencies", 2006.
    """

    def __init__(
        self, n_groups: int, n_targets: int, combine: Combine, weights: np.ndarray
    ) -> None:
        """Start with sums of 0. ``weights`` is the result of ``run_weights``."""
        self.combine, self.weights = combine, weights
        self.plain = np.zeros((n_groups, n_targets))
        self.drawn = np.zeros((n_groups, N_DRAWS, n_targets))
        self.counts = np.zeros((n_groups, N_DRAWS))
        self._random = np.random.default_rng(1)

    def add(
        self,
        similarities: np.ndarray,
        loss_weights: np.ndarray,
        norms: Sequence[float],
        groups: Sequence[np.ndarray],
    ) -> None:
        """Add a block of samples.

        Args:
            similarities: For each of C checkpoints, the similarities of the samples to the targets
                (A_c in docs/explanation/scores.md), shape (C, rows, m).
            loss_weights: The loss weights to the configured power, shape (C, rows).
            norms: For ``unit_average``, the norm ||B_c|| of each checkpoint. Otherwise ones.
            groups: For each grouping column, the number of each sample's group, shape (rows,).
                Groups of different columns have different numbers.
        """
        # Let v_c be the weights of checkpoints in a draw, V their sum, and Q_c the loss weights.
        # The score of sample i is (sum_c v_c A_c[i] / V) (sum_c v_c Q_c[i] / V) for
        # product_of_averages, and otherwise sum_c v_c A_c[i] Q_c[i] / ||B_c|| / V.
        times = self._random.poisson(1, (similarities.shape[1], N_DRAWS)).astype(np.float64)
        is_product = self.combine is Combine.PRODUCT_OF_AVERAGES
        if not is_product:
            factors = loss_weights / np.asarray(norms)[:, None]
            similarities = similarities * factors[:, :, None]
        members = [(g, np.flatnonzero(own == g)) for own in groups for g in np.unique(own)]
        for group, rows in members:
            self.counts[group] += times[rows].sum(axis=0)
        for draw, weights in enumerate(self.weights):
            total = weights.sum()
            scores = np.tensordot(weights, similarities, axes=1) / total
            if is_product:
                scores *= ((weights @ loss_weights) / total)[:, None]
            if draw == 0:
                for group, rows in members:
                    self.plain[group] += scores[rows].sum(axis=0)
                continue
            draws = slice((draw - 1) * SAMPLE_DRAWS, draw * SAMPLE_DRAWS)
            for group, rows in members:
                self.drawn[group, draws] += times[rows, draws].T @ scores[rows]

    def drawn_means(self) -> np.ndarray:
        """Return the mean score of each group in each draw, for m targets.

        The result has shape (groups, draws, m). It is NaN if a draw contains no sample of a group.
        """
        with np.errstate(invalid="ignore"):
            return self.drawn / self.counts[:, :, None]


def sample_variances(draws: np.ndarray, sizes: np.ndarray | int) -> Variances:
    """Return the variances of group means that arise from the choice of training samples.

    ``draws`` contains bootstrap draws of the group means, shape (..., N_DRAWS), with NaN for draws
    without samples of the group. ``sizes`` contains the numbers of samples, shape (...). The
    variance between draws with the same runs is multiplied by size / (size - 1), which removes its
    bias. A group of one sample has the variance 0. The result has shape (...).
    """
    variance = _within_runs(draws) * sizes / np.maximum(np.subtract(sizes, 1), 1)
    return Variances(variance, np.broadcast_to(np.subtract(sizes, 1.0), variance.shape))


def group_interval(
    draws: np.ndarray, means: np.ndarray, samples: Variances, n_runs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return confidence intervals of group means, or of differences between group means.

    ``draws`` are bootstrap draws of ``means``, with shape (..., N_DRAWS). The other arrays have
    shape (...). ``samples`` is the result of ``sample_variances``. If there are at least two runs,
    the variances between runs are added.
    """
    if n_runs > 1:
        # A mean over SAMPLE_DRAWS draws with the same runs still contains the randomness of the
        # drawn samples. Its variance is subtracted, so that only the variance between runs remains.
        # For R runs, the factor R / (R - 1) makes the variance of the bootstrap unbiased.
        remainder = _within_runs(draws) / SAMPLE_DRAWS
        runs = np.maximum(np.nanvar(_run_means(draws), axis=-1, ddof=1) - remainder, 0)
        samples += Variances(runs * n_runs / (n_runs - 1), np.full(runs.shape, n_runs - 1.0))
    return rescaled_intervals(draws, means, samples)


def _within_runs(draws: np.ndarray) -> np.ndarray:
    """Return the variance between the bootstrap draws that use the same runs, ignoring NaN."""
    centred = _by_run(draws) - _run_means(draws)[..., None]
    freedom = (np.isfinite(centred).sum(axis=-1) - 1).clip(0).sum(axis=-1)
    return np.nansum(centred**2, axis=(-1, -2)) / np.maximum(freedom, 1)


def _run_means(draws: np.ndarray) -> np.ndarray:
    """Return the means of the bootstrap draws that use the same runs, ignoring NaN."""
    counts = np.isfinite(_by_run(draws)).sum(axis=-1)
    total = np.nansum(_by_run(draws), axis=-1)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def _by_run(draws: np.ndarray) -> np.ndarray:
    return draws.reshape(*draws.shape[:-1], RUN_DRAWS, SAMPLE_DRAWS)


def sums_of_groups(
    parts: Sequence[Part],
    rows: Sequence[ReadRows],
    spec: ScoresSpec,
    groupings: Sequence[Grouping],
    improves: np.ndarray,
    memory_mb: int,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return sums of scores over groups of training samples, with bootstrap draws and intervals.

    ``parts`` contains the data of each checkpoint. ``rows`` contains, for each checkpoint, a
    function that reads rows of its matrix A (see docs/explanation/scores.md). Targets are processed
    in blocks that fit in memory. Scores of target j are multiplied by ``improves[j]``, which is 1
    or -1, so that positive scores help.

    Returns:
        The sums of scores for each target, shape (groups, m); bootstrap draws of the group means
        over all targets, shape (groups, N_DRAWS); and the lower and upper ends of the confidence
        intervals of the group means for each target, shape (groups, m) each.
    """
    n_targets = len(improves)
    assert spec.runs is not None
    assert spec.loss_weight_power is not None
    # Groups are numbered consecutively over all columns.
    group_sizes = np.concatenate([np.bincount(grouping.numbers) for grouping in groupings]).tolist()
    firsts = np.cumsum([0, *(len(grouping.names) for grouping in groupings)])[:-1]
    numbers = [own.numbers + first for own, first in zip(groupings, firsts, strict=True)]
    n_groups = len(group_sizes)
    run_of = {c: i for i, run in enumerate(spec.runs.values()) for c in run}
    weights = run_weights([run_of[checkpoint] for checkpoint in spec.checkpoints])
    norms = [part.scalar("train_norm") if spec.norm_power is not None else 1.0 for part in parts]
    need = GroupsNeed(n_groups, n_targets, len(parts))
    at_once = need.targets(memory_mb)
    n_train = len(groupings[0].numbers)
    plain = np.empty((n_groups, n_targets))
    ends = np.empty_like(plain), np.empty_like(plain)
    drawn = np.zeros((n_groups, N_DRAWS))
    for first in range(0, n_targets, at_once):
        own = slice(first, min(first + at_once, n_targets))
        sums = GroupSums(n_groups, own.stop - first, Combine(spec.combine), weights)
        for start, stop in blocks_with_progress(n_train, need.rows(memory_mb), "training samples"):
            similarities = np.stack([read(start, stop)[:, own] for read in rows]).astype(np.float64)
            similarities *= improves[own]
            loss_weights = np.stack([
                powered(part.vector("loss_weights", start, stop), spec.loss_weight_power)
                for part in parts
            ])
            groups = [of_column[start:stop] for of_column in numbers]
            sums.add(similarities, loss_weights, norms, groups)
        means = sums.drawn_means()
        plain[:, own] = sums.plain
        for group, size in enumerate(group_sizes):
            draws = means[group].T
            variances = sample_variances(draws, size)
            low, high = group_interval(draws, sums.plain[group] / size, variances, len(spec.runs))
            ends[0][group, own], ends[1][group, own] = low, high
        drawn += means.sum(axis=2)
    return plain, drawn / n_targets, ends


def group_tables(
    groupings: Sequence[Grouping],
    plain: np.ndarray,
    drawn: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    target_ids: Sequence[Any],
    n_runs: int,
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables ``groups``, ``targets`` and ``differences`` of a file of group sums.

    ``groups`` contains the sum and the mean of the scores in each group, over all targets.
    ``targets`` contains these numbers for each target. ``differences`` contains the differences
    between the means of any two groups of a column, and is empty if no column has two groups.
    ``plain``, ``drawn`` and ``ends`` are the results of ``sums_of_groups``, whose first axis
    contains the groups of all columns in order.
    """
    groups, differences, first = [], [], 0
    for grouping in groupings:
        sizes = np.bincount(grouping.numbers, minlength=len(grouping.names))
        own = slice(first, first + len(grouping.names))
        means, draws = plain[own].mean(axis=1) / sizes, drawn[own]
        variances = sample_variances(draws, sizes)
        low, high = group_interval(draws, means, variances, n_runs)
        of_column = {"column": grouping.column, "group": grouping.names, "n": sizes}
        columns = {"sum": means * sizes, "mean": means, "low": low, "high": high}
        groups.append(pd.DataFrame({**of_column, **columns}))
        first = own.stop
        names = np.array(grouping.names, dtype=object)
        for i in range(len(names) - 1):
            others = slice(i + 1, None)
            difference = means[i] - means[others]
            samples = variances.select(i) + variances.select(others)
            low, high = group_interval(draws[i] - draws[others], difference, samples, n_runs)
            pairs = {"column": grouping.column, "group": names[i], "other": names[others]}
            pairs |= {"difference": difference, "low": low, "high": high}
            differences.append(pd.DataFrame(pairs))
    table = pd.concat(groups, ignore_index=True)
    m = plain.shape[1]
    targets = table.loc[table.index.repeat(m), ["column", "group"]].reset_index(drop=True)
    targets["target_id"] = np.tile(target_ids, len(table))
    targets["sum"] = plain.ravel()
    targets["mean"] = (plain / table["n"].to_numpy()[:, None]).ravel()
    targets["low"], targets["high"] = (end.ravel() for end in ends)
    return table, targets, pd.concat([pd.DataFrame(), *differences], ignore_index=True)

"""Sum scores over groups of training samples, with bootstrap intervals over samples and runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trak_core.attribution.fitted_checkpoint import Part, ReadRows
from trak_core.attribution.score_formulas import powered
from trak_core.config.memory_needs import GroupsNeed
from trak_core.errors import InputError
from trak_core.evaluation.intervals import Chance, expanded
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import Combine, ScoresSpec

# The number of draws of runs, and the number of draws of samples for each draw of runs.
RUN_DRAWS, SAMPLE_DRAWS = 100, 10
N_DRAWS = RUN_DRAWS * SAMPLE_DRAWS
_MAX_GROUPS = 100
# Columns that all tables of scores have.
_TABLE_COLUMNS = ("label", "prediction")


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a column: their sorted names, and the number of each sample's group.

    ``numbers`` has shape (n,), integers.
    """

    column: str
    names: Sequence[str]
    numbers: np.ndarray

    @classmethod
    def of(cls, column: str, values: Iterable[Any]) -> "Grouping":
        """Group equal values, which must be at most 100 distinct texts or integers."""
        array = np.asarray(pd.Series(list(values)))
        if array.dtype.kind == "f":
            raise InputError(
                f"groups: {column} must contain texts or integers. Found the fraction "
                f"{array[0]:g}. Let the study return a column of classes, such as 'under 10'.",
                code="scoring.group_values",
            )
        names, numbers = np.unique(array, return_inverse=True)
        if len(names) > _MAX_GROUPS:
            raise InputError(
                f"groups: {column} must have at most {_MAX_GROUPS} distinct values. Found "
                f"{len(names)}, such as {names[0]}. Use a coarser column.",
                code="scoring.many_groups",
            )
        return cls(column, [str(name) for name in names], numbers)


def check_groups(group_by: Iterable[str], study_columns: pd.DataFrame) -> None:
    """Check that tables of scores will have the columns to group by, with few distinct values.

    ``study_columns`` contains the columns that the study returns for its training samples.
    """
    for name in group_by:
        if name in study_columns:
            Grouping.of(name, study_columns[name])
        elif name not in _TABLE_COLUMNS:
            known = ", ".join([*_TABLE_COLUMNS, *study_columns])
            raise InputError(
                f"groups must be columns of the training samples: {known}. Found {name}. The "
                "study's train_columns() can return more columns.",
                code="scoring.no_group_column",
            )


def run_weights(runs: Sequence[int]) -> np.ndarray:
    """Return the weight of each checkpoint in each draw of runs, shape (RUN_DRAWS + 1, C).

    Runs are drawn with replacement. A weight is the number of times that the checkpoint's run is
    drawn. In the first row, all weights are 1. ``runs`` contains the number of each checkpoint's
    run, from 0.
    """
    n_runs = max(runs) + 1
    draws = np.random.default_rng(0).multinomial(n_runs, np.full(n_runs, 1 / n_runs), RUN_DRAWS)
    return np.vstack([np.ones(n_runs), draws])[:, list(runs)]


class GroupSums:
    """Sums of scores over the samples of each group, accumulated over blocks of samples.

    ``plain`` (groups, m) contains the sums, and ``drawn`` (groups, draws, m) the sums of bootstrap
    draws. In a draw, the weight of a sample is a Poisson number with mean 1, which is the same for
    all targets and runs. A draw uses the same runs for all groups, so that differences between
    groups are paired. Blocks must be in the order of the samples. The size of blocks does not
    change the sums, except for float64 rounding.

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
        """Add a block of samples: rows of A_c, shape (C, rows, m), and Q_c^power, (C, rows).

        ``norms`` contains ||B|| of each checkpoint for ``unit_average``, else ones. ``groups``
        contains an array for each column: the numbers of the samples' groups, shape (rows,). The
        groups of all columns are numbered consecutively.
        """
        # With weights v_c of the checkpoints in a draw and V = sum_c v_c, the score of sample i is
        # (sum_c v_c A_c[i] / V) (sum_c v_c Q_c[i] / V) for product_of_averages, and otherwise
        # sum_c v_c A_c[i] Q_c[i] / ||B_c|| / V.
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
        """Return the mean over each group's samples in each draw, shape (groups, draws, m).

        The mean is NaN if a draw contains no sample of the group.
        """
        with np.errstate(invalid="ignore"):
            return self.drawn / self.counts[:, :, None]


def chance_of_samples(draws: np.ndarray, sizes: np.ndarray | int) -> Chance:
    """Return the variances of groups' means that are due to their samples, shape (...).

    They are the variances between draws with the same runs, times size / (size - 1) for groups of
    ``sizes``, shape (...). ``draws`` contains means over a group's samples, shape (..., N_DRAWS),
    or NaN for draws without samples of the group. The variance for a single sample is 0.
    """
    variance = _within_runs(draws) * sizes / np.maximum(np.subtract(sizes, 1), 1)
    return Chance(variance, np.broadcast_to(np.subtract(sizes, 1.0), variance.shape))


def group_interval(
    draws: np.ndarray, means: np.ndarray, samples: Chance, n_runs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return intervals of groups' means, or of differences between them.

    The variance is that of ``samples``. If there are at least two runs, the variance between runs
    is added. ``draws`` has shape (..., N_DRAWS), and the other arrays have shape (...).
    """
    if n_runs > 1:
        # A mean over SAMPLE_DRAWS draws of samples still has the variance of these draws, divided
        # by SAMPLE_DRAWS. It is subtracted, so that only the variance between runs remains. The
        # factor R / (R - 1) for R runs makes the bootstrap's variance unbiased.
        remainder = _within_runs(draws) / SAMPLE_DRAWS
        runs = np.maximum(np.nanvar(_run_means(draws), axis=-1, ddof=1) - remainder, 0)
        samples += Chance(runs * n_runs / (n_runs - 1), np.full(runs.shape, n_runs - 1.0))
    return expanded(draws, means, samples)


def _within_runs(draws: np.ndarray) -> np.ndarray:
    """Return the variance between draws of samples with the same runs, shape (...)."""
    centred = _by_run(draws) - _run_means(draws)[..., None]
    freedom = (np.isfinite(centred).sum(axis=-1) - 1).clip(0).sum(axis=-1)
    return np.nansum(centred**2, axis=(-1, -2)) / np.maximum(freedom, 1)


def _run_means(draws: np.ndarray) -> np.ndarray:
    """Return means over draws of samples, (..., RUN_DRAWS), or NaN if all draws are NaN."""
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
    """Return sums of scores, bootstrap draws of group means, and confidence intervals.

    The sums have shape (groups, m). The draws have shape (groups, ``N_DRAWS``), and each one is a
    mean over all targets. The intervals are two arrays of the shape of the sums, with the bounds of
    each target's group means. ``improves``, shape (m,), contains the sign of the scores that
    improve each target. Targets are processed in blocks that fit in memory.
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
            chance = chance_of_samples(draws, size)
            low, high = group_interval(draws, sums.plain[group] / size, chance, len(spec.runs))
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
    """Return the tables ``groups``, ``targets`` and ``differences``.

    ``differences`` is empty if no column has two groups. The first axis of the arrays contains the
    groups of all columns in order. ``plain`` are sums of scores over the samples of a group, shape
    (groups, m). ``drawn`` are draws of a group's mean over its samples and all targets, shape
    (groups, draws). ``ends`` are the lower and upper ends of the intervals of a group's mean for
    each target, shape (groups, m) each.
    """
    groups, differences, first = [], [], 0
    for grouping in groupings:
        sizes = np.bincount(grouping.numbers, minlength=len(grouping.names))
        own = slice(first, first + len(grouping.names))
        means, draws = plain[own].mean(axis=1) / sizes, drawn[own]
        chances = chance_of_samples(draws, sizes)
        low, high = group_interval(draws, means, chances, n_runs)
        of_column = {"column": grouping.column, "group": grouping.names, "n": sizes}
        columns = {"sum": means * sizes, "mean": means, "low": low, "high": high}
        groups.append(pd.DataFrame({**of_column, **columns}))
        first = own.stop
        names = np.array(grouping.names, dtype=object)
        for i in range(len(names) - 1):
            others = slice(i + 1, None)
            difference = means[i] - means[others]
            chance = chances.part(i) + chances.part(others)
            low, high = group_interval(draws[i] - draws[others], difference, chance, n_runs)
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

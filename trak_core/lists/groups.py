"""Sum scores over groups of training samples, with intervals from resampling samples and runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from trak_core.errors import InputError
from trak_core.evaluation.intervals import Chance, expanded
from trak_core.spec import Combine

# Draws of runs, and draws of samples under each of them.
RUN_DRAWS, SAMPLE_DRAWS = 100, 10
N_DRAWS = RUN_DRAWS * SAMPLE_DRAWS
_MOST_GROUPS = 100
_KNOWN = ("label", "prediction")


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups that a column makes: their names, in order, and each sample's number among them.

    ``numbers`` has shape (n,), integers.
    """

    column: str
    names: Sequence[str]
    numbers: np.ndarray

    @classmethod
    def of(cls, column: str, values: Iterable[Any]) -> "Grouping":
        """Return the groups of equal values: texts or whole numbers, 100 different ones at most."""
        array = np.asarray(pd.Series(list(values)))
        if array.dtype.kind == "f":
            raise InputError(
                f"groups: {column} must hold texts or whole numbers. Found fractions, such as "
                f"{array[0]:g}. Let the study return a column of classes, such as 'under 10'.",
                code="scoring.group_values",
            )
        names, numbers = np.unique(array, return_inverse=True)
        if len(names) > _MOST_GROUPS:
            raise InputError(
                f"groups: {column} must make at most {_MOST_GROUPS} groups. Found {len(names)} "
                f"different values, such as {names[0]}. Take a coarser column.",
                code="scoring.many_groups",
            )
        return cls(column, [str(name) for name in names], numbers)


def check_groups(group_by: Iterable[str], own: pd.DataFrame) -> None:
    """Refuse columns to group by that a table of scores won't have, or that make no groups.

    ``own`` are the columns that the study brings of its training samples, beside ``label`` and
    ``prediction``.
    """
    for name in group_by:
        if name in own:
            Grouping.of(name, own[name])
        elif name not in _KNOWN:
            raise InputError(
                f"groups must name columns of the training samples: {', '.join([*_KNOWN, *own])}. "
                f"Found {name}. The study's train_columns() can bring more.",
                code="scoring.no_group_column",
            )


def run_weights(runs: Sequence[int]) -> np.ndarray:
    """Return how often each checkpoint counts in every draw of runs, shape (RUN_DRAWS + 1, C).

    ``runs`` has the number of each checkpoint's run, from 0. Runs are drawn with replacement, all
    checkpoints of one together. The first row counts each once; so do all rows of a single run.
    """
    n_runs = max(runs) + 1
    draws = np.random.default_rng(0).multinomial(n_runs, np.full(n_runs, 1 / n_runs), RUN_DRAWS)
    return np.vstack([np.ones(n_runs), draws])[:, list(runs)]


@dataclass(slots=True)
class GroupSums:
    """Sums over the samples of every group, block by block; ``drawn`` resamples, ``plain`` doesn't.

    A sample counts in a draw as often as a Poisson number of mean 1 says, the same for all targets
    and runs. So groups' means are paired: a draw takes the same runs for all of them. Samples come
    in their order; how they are cut into blocks changes the rounding of float64 sums alone.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 6; Hanley and
        MacGibbon, "Creating non-parametric bootstrap samples using Poisson frequencies", 2006.
    """

    n_groups: int
    n_targets: int
    combine: Combine
    weights: np.ndarray
    plain: np.ndarray = field(init=False)
    drawn: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Begin with zeros."""
        self.plain = np.zeros((self.n_groups, self.n_targets))
        self.drawn = np.zeros((self.n_groups, N_DRAWS, self.n_targets))
        self.counts = np.zeros((self.n_groups, N_DRAWS))
        self.random = np.random.default_rng(1)

    def add(
        self,
        similarities: np.ndarray,
        loss_weights: np.ndarray,
        norms: Sequence[float],
        groups: Sequence[np.ndarray],
    ) -> None:
        """Add a block of samples: rows of every A_c, shape (C, rows, m), and Q_c^power, (C, rows).

        ||B|| counts for ``unit_average`` alone. For each grouping column there are the samples'
        groups, shape (rows,): numbers from 0, which go on from one column to the next.
        """
        times = self.random.poisson(1, (similarities.shape[1], N_DRAWS)).astype(np.float64)
        is_product = self.combine is Combine.PRODUCT_OF_AVERAGES
        if not is_product:
            sizes = np.asarray(
                norms if self.combine is Combine.UNIT_AVERAGE else np.ones(len(norms))
            )
            similarities = similarities * (loss_weights / sizes[:, None])[:, :, None]
        members = [
            (group, np.flatnonzero(numbers == group))
            for numbers in groups
            for group in np.unique(numbers)
        ]
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
        """Return each draw's means over the group's samples, (groups, draws, m).

        NaN where a draw has no sample of a small group.
        """
        with np.errstate(invalid="ignore"):
            return self.drawn / self.counts[:, :, None]


def chance_of_samples(draws: np.ndarray, size: int) -> Chance:
    """Return what means of a group owe to its samples: the spread of draws of the same runs.

    Draws have shape (..., N_DRAWS), NaN where one has no sample; the result has shape (...). The
    mean of a single sample has no spread.
    """
    variance = _within_runs(draws) * size / max(size - 1, 1)
    return Chance(variance, np.full(variance.shape, size - 1.0))


def group_interval(
    draws: np.ndarray, means: np.ndarray, samples: Chance, n_runs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return intervals of groups' means, or of differences: samples, and what runs add to them.

    Draws have shape (..., N_DRAWS), the others (...). With one run nothing is added.
    """
    if n_runs > 1:
        # The mean of a run's draws of samples still has a part of their variance.
        left = _within_runs(draws) / SAMPLE_DRAWS
        runs = np.maximum(np.nanvar(_run_means(draws), axis=-1, ddof=1) - left, 0)
        samples += Chance(runs * n_runs / (n_runs - 1), np.full(runs.shape, n_runs - 1.0))
    return expanded(draws, means, samples)


def _within_runs(draws: np.ndarray) -> np.ndarray:
    """Return the variance of draws of samples under the same draw of runs, shape (...)."""
    centred = _by_run(draws) - _run_means(draws)[..., None]
    freedom = (np.isfinite(centred).sum(axis=-1) - 1).clip(0).sum(axis=-1)
    return np.nansum(centred**2, axis=(-1, -2)) / np.maximum(freedom, 1)


def _run_means(draws: np.ndarray) -> np.ndarray:
    """Return means over the draws of samples, (..., RUN_DRAWS), NaN where none has a sample."""
    counts = np.isfinite(_by_run(draws)).sum(axis=-1)
    total = np.nansum(_by_run(draws), axis=-1)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def _by_run(draws: np.ndarray) -> np.ndarray:
    return draws.reshape(*draws.shape[:-1], RUN_DRAWS, SAMPLE_DRAWS)


def group_tables(
    groupings: Sequence[Grouping],
    plain: np.ndarray,
    drawn: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    target_ids: Sequence[Any],
    n_runs: int,
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables ``groups``, ``targets`` and ``differences``, empty without two groups.

    Args:
        groupings: Columns with their groups, which are numbered on from one to the next.
        plain: Sums of scores over each group's samples, shape (groups, m).
        drawn: Draws of each group's mean over its samples and all targets, shape (groups, draws).
        ends: Ends of the intervals of each group's mean for each target, two of shape (groups, m).
        target_ids: Those of the m targets.
        n_runs: Training runs that were drawn.
    """
    groups, differences, first = [], [], 0
    for grouping in groupings:
        sizes = np.bincount(grouping.numbers, minlength=len(grouping.names))
        own = slice(first, first + len(grouping.names))
        means, draws = plain[own].mean(axis=1) / sizes, drawn[own]
        chances = [chance_of_samples(*pair) for pair in zip(draws, sizes.tolist(), strict=True)]
        low, high = group_interval(draws, means, _stacked(chances), n_runs)
        of_column = {"column": grouping.column, "group": grouping.names, "n": sizes}
        columns = {"sum": means * sizes, "mean": means, "low": low, "high": high}
        groups.append(pd.DataFrame({**of_column, **columns}))
        first = own.stop
        names = np.array(grouping.names, dtype=object)
        for i in range(len(names) - 1):
            others = slice(i + 1, None)
            less = means[i] - means[others]
            chance = _stacked([chances[i] + other for other in chances[others]])
            low, high = group_interval(draws[i] - draws[others], less, chance, n_runs)
            pairs = {"column": grouping.column, "group": names[i], "other": names[others]}
            differences.append(
                pd.DataFrame({**pairs, "difference": less, "low": low, "high": high})
            )
    table = pd.concat(groups, ignore_index=True)
    m = plain.shape[1]
    targets = table.loc[table.index.repeat(m), ["column", "group"]].reset_index(drop=True)
    targets["target_id"] = np.tile(np.array(target_ids, dtype=object), len(table))
    if not isinstance(target_ids[0], str):
        targets["target_id"] = targets["target_id"].astype(np.int64)
    targets["sum"] = plain.ravel()
    targets["mean"] = (plain / table["n"].to_numpy()[:, None]).ravel()
    targets["low"], targets["high"] = (end.ravel() for end in ends)
    return table, targets, pd.concat([pd.DataFrame(), *differences], ignore_index=True)


def _stacked(chances: Sequence[Chance]) -> Chance:
    return Chance(*(np.array(part) for part in zip(*chances, strict=True)))

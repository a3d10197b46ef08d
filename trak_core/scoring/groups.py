"""Sum scores over groups of training samples, with intervals from resampling samples and runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from trak_core.errors import InputError
from trak_core.spec import Combine

# The part of draws that every interval holds, of groups and of evaluations.
CONFIDENCE = 0.95
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


def interval(draws: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of percentile intervals along an axis; draws that are NaN don't count."""
    outside = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(draws, [outside, 1 - outside], axis=axis)
    return low, high


def group_tables(
    groupings: Sequence[Grouping],
    plain: np.ndarray,
    drawn: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    target_ids: Sequence[Any],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables ``groups``, ``targets`` and ``differences``, empty without two groups.

    Args:
        groupings: Columns with their groups, which are numbered on from one to the next.
        plain: Sums of scores over each group's samples, shape (groups, m).
        drawn: Draws of each group's mean over its samples and all targets, shape (groups, draws).
        ends: Ends of the intervals of each group's mean for each target, two of shape (groups, m).
        target_ids: Those of the m targets.
    """
    groups, differences, first = [], [], 0
    for grouping in groupings:
        sizes = np.bincount(grouping.numbers, minlength=len(grouping.names))
        own = slice(first, first + len(grouping.names))
        sums, draws = plain[own].mean(axis=1), drawn[own]
        low, high = interval(draws, axis=1)
        of_column = {"column": grouping.column, "group": grouping.names, "n": sizes, "sum": sums}
        groups.append(pd.DataFrame({**of_column, "mean": sums / sizes, "low": low, "high": high}))
        first = own.stop
        i, j = np.triu_indices(len(grouping.names), k=1)
        if not len(i):
            continue
        names, means = np.array(grouping.names, dtype=object), sums / sizes
        low, high = interval(draws[i] - draws[j], axis=1)
        pairs = {"column": grouping.column, "group": names[i], "other": names[j]}
        both = {**pairs, "difference": means[i] - means[j], "low": low, "high": high}
        differences.append(pd.DataFrame(both))
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

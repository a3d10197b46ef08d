"""Rank training samples for a reader to act on: wrong labels, harm, the best of them, copies."""

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from trak_core.attribution.scores import Extremes, largest, unit_rows
from trak_core.spec import MEAN_OF

# A copy is so much nearer than the fifth nearest sample; rounding of a row of features aside.
_NEIGHBOURS, _CLOSE, _SAME = 5, 0.9, 1e-5
# Columns of the lists that are the scores file's; the study's own come after them.
_KNOWN = ("id", "label", "prediction", "output", "output_sd", "loss_weight", "help", "harm")

# A sample that is harmful to fewer targets than this may be so by chance.
ENOUGH_TARGETS = 100

ReadRows = Callable[[int, int], np.ndarray]


def _ranked(train: pd.DataFrame, order: np.ndarray, **columns: np.ndarray) -> pd.DataFrame:
    """Return samples in an order: id and rank, then given columns, then all others."""
    rows = train.assign(**columns).iloc[order].reset_index(drop=True)
    rows["rank"] = np.arange(1, len(rows) + 1)
    first = ["id", "rank", *columns]
    return rows[[*first, *(name for name in rows if name not in first)]]


def few_targets(targets: pd.DataFrame) -> bool:
    """Return whether a list of suspects rests on too few targets, as a scores file has them.

    A mean of targets is no few: the file doesn't say how many there are.
    """
    return len(targets) < ENOUGH_TARGETS and MEAN_OF not in targets


def suspects(train: pd.DataFrame) -> pd.DataFrame:
    """Return all training samples, those first that harm targets most: likely wrong labels.

    The targets' own labels must be right, on the whole. A sample with a wrong label worsens the
    model output of the targets that it looks like.

    Columns are id, rank, ``worth_a_look`` (1 where the harm is larger than the help, which is no
    count of wrong labels), ``suggested_label``, harm, help, and the others of ``train``,
    the table of a scores file.

    Source: docs/how-to/clean-data.md, "Find wrong labels".
    """
    table = train.rename(columns={"harmed_label": "suggested_label"})
    harm, help_ = table["harm"].to_numpy(), table["help"].to_numpy()
    order = np.argsort(-harm, kind="stable")
    columns = {"worth_a_look": (harm > help_).astype(np.int64)}
    if "suggested_label" in table:
        columns["suggested_label"] = table["suggested_label"].to_numpy()
    return _ranked(table, order, **columns, harm=harm, help=help_)


def most_harmful(train: pd.DataFrame) -> pd.DataFrame:
    """Return the training samples that harm targets more than they help, most harmful first.

    Columns are id, rank, ``score`` (help minus harm, below 0 for each sample), and those of
    ``train``, the table of a scores file.
    """
    score = _mean_score(train)
    order = np.argsort(score, kind="stable")[: int((score < 0).sum())]
    return _ranked(train.drop(columns="harmed_label", errors="ignore"), order, score=score)


def best_in_turn(
    train: pd.DataFrame, top_influences: pd.DataFrame, fraction: float
) -> pd.DataFrame:
    """Return the training samples that help targets most, for which the targets take turns.

    In their turn, each takes the best of its top influences that nobody has taken, if there is one
    that improves it. So no kind of target is left out, as it would be if the samples with the
    largest help minus harm were taken, which can be much alike. Where all top influences are taken,
    these follow.

    A positive score must improve its target. The tables are those of a scores file; the
    ``fraction`` that is taken is rounded up. Columns are as for ``most_harmful``.
    """
    score = _mean_score(train)
    row_of = {sample_id: row for row, sample_id in enumerate(train["id"])}
    improving = top_influences["score"] > 0
    helpful = top_influences.loc[improving, ["target_id", "rank", "train_id"]]
    choices = helpful.sort_values("rank", kind="stable").groupby("target_id", sort=False)[
        "train_id"
    ]
    queues = [iter([row_of[i] for i in own]) for _, own in choices]
    taken: dict[int, None] = {}
    while queues:
        # A target that has found nothing left takes no further turn.
        queues = [queue for queue in queues if _take_next(queue, taken)]
    order = [*taken, *(row for row in np.argsort(-score, kind="stable") if row not in taken)]
    kept = np.array(order[: int(np.ceil(fraction * len(train)))])
    return _ranked(train.drop(columns="harmed_label", errors="ignore"), kept, score=score)


def most_consistent(train: pd.DataFrame, fraction: float) -> pd.DataFrame:
    """Return the training samples with the largest (help - harm) / (help + harm).

    These are to train on where some targets want a larger f and others a smaller one. A label that
    is far too large improves each of the former most, but worsens the latter as much, and how far
    off it is cancels here. Arguments and columns are as for ``best_in_turn``.
    """
    score = _mean_score(train)
    size = train["help"].to_numpy(np.float64) + train["harm"].to_numpy(np.float64)
    share = score / np.where(size > 0, size, 1)
    kept = np.argsort(-share, kind="stable")[: int(np.ceil(fraction * len(train)))]
    return _ranked(train.drop(columns="harmed_label", errors="ignore"), kept, score=score)


def _take_next(queue: Iterator[int], taken: dict[int, None]) -> bool:
    row = next((row for row in queue if row not in taken), None)
    if row is not None:
        taken[row] = None
    return row is not None


def _mean_score(train: pd.DataFrame) -> np.ndarray:
    return train["help"].to_numpy(dtype=np.float64) - train["harm"].to_numpy(dtype=np.float64)


def nearest(
    read: ReadRows, n_rows: int, others: np.ndarray, *, block: int, first: int | None = None
) -> Extremes:
    """Return the rows whose features have the largest cosines with those of some samples.

    These are the five largest of each sample at most, shape (5, m), float32. ``read`` gives rows of
    features, shape (rows, k), from start to stop; ``others`` are those of the samples, shape
    (m, k). If these are among the rows, from ``first`` on, none is its own neighbour. The
    ``block``, rows to read at once, changes nothing.
    """
    unit = unit_rows(others).T.astype(np.float32)
    extremes: Extremes | None = None
    for start in range(0, n_rows, block):
        stop = min(start + block, n_rows)
        cosines = unit_rows(read(start, stop)).astype(np.float32) @ unit
        if first is not None:
            own = np.arange(max(start, first), min(stop, first + others.shape[0]))
            cosines[own - start, own - first] = -np.inf
        extremes = largest(extremes, start, cosines, _NEIGHBOURS)
    assert extremes is not None
    return extremes


def copies(neighbours: Extremes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return samples that have a copy among the rows, these rows, cosines and closeness.

    A copy is much nearer than other samples are: ``closeness`` is 1 less the distance (1 less the
    cosine) to the nearest row by that to the fifth nearest. From .9 on a pair counts.
    """
    cosines = np.minimum(neighbours.scores.astype(np.float64), 1)
    # A sample's own row has no cosine.
    real = np.isfinite(cosines).sum(axis=0) - 1
    farthest = np.take_along_axis(cosines, np.maximum(real, 0)[None], axis=0)[0]
    distance = 1 - cosines[0]
    closeness = np.where(distance < _SAME, 1.0, 1 - distance / np.maximum(1 - farthest, _SAME))
    pairs = np.flatnonzero((real >= 0) & (closeness >= _CLOSE))
    return pairs, neighbours.rows[0, pairs], cosines[0, pairs], closeness[pairs]

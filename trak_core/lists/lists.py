"""Rank training samples by likely wrong labels, harm or help, and find copies of samples."""

import numpy as np
import pandas as pd

from trak_core.artifacts import Rows
from trak_core.attribution.score_formulas import Extremes, largest, unit_rows
from trak_core.settings import MEAN_OF

# A pair is a copy if its closeness, relative to the fifth nearest sample, is at least _CLOSE.
_NEIGHBOURS, _CLOSE = 5, 0.9
# Smaller cosine distances are rounding errors of float32 features.
_SAME = 1e-5

# With fewer targets, the order by harm can depend much on which targets were chosen.
ENOUGH_TARGETS = 100


def _ranked(train: pd.DataFrame, order: np.ndarray, *names: str) -> pd.DataFrame:
    """Return the samples in this order. Id, rank and ``names`` come before other columns."""
    rows = train.iloc[order].reset_index(drop=True)
    rows["rank"] = np.arange(1, len(rows) + 1)
    first = ["id", "rank", *(name for name in names if name in rows)]
    return rows[[*first, *(name for name in rows if name not in first)]]


def few_targets(targets: pd.DataFrame) -> bool:
    """Return whether a scores file has too few targets for a reliable list of suspects.

    The result is False for a mean of targets, because the file lacks the number of targets.
    """
    return len(targets) < ENOUGH_TARGETS and MEAN_OF not in targets


def suspects(train: pd.DataFrame) -> pd.DataFrame:
    """Return all training samples, the most harmful first.

    A sample with a wrong label worsens the model output of similar targets, so the most harmful
    samples are likely to have wrong labels. Most labels of the targets must be right.

    Columns are id, rank, ``worth_a_look``, ``suggested_label``, harm, help, and the other columns
    of ``train``, the table of a scores file. ``worth_a_look`` is 1 if the harm is larger than the
    help. This does not mean that the label is wrong.

    Source: docs/how-to/lists.md, "Help and harm".
    """
    table = train.rename(columns={"harmed_label": "suggested_label"})
    table["worth_a_look"] = (table["harm"] > table["help"]).astype(np.int64)
    order = np.argsort(-table["harm"].to_numpy(), kind="stable")
    return _ranked(table, order, "worth_a_look", "suggested_label", "harm", "help")


def most_harmful(train: pd.DataFrame) -> pd.DataFrame:
    """Return the training samples that harm targets more than they help, the most harmful first.

    Columns are id, rank, ``score`` (help minus harm, which is negative), and the columns of
    ``train``, the table of a scores file.
    """
    score = _help_minus_harm(train)
    order = np.argsort(score, kind="stable")[: int((score < 0).sum())]
    return _by_score(train, order, score)


def best_in_turn(
    train: pd.DataFrame, top_influences: pd.DataFrame, fraction: float
) -> pd.DataFrame:
    """Return the most helpful training samples, which targets choose in turn.

    In each turn, a target chooses the most helpful of its top influences that is not chosen yet.
    Therefore samples for all kinds of targets are chosen, while the samples with the largest help
    minus harm can be very similar. When no target has top influences to choose, the remaining
    samples follow, by help minus harm.

    A positive score must improve its target. The tables are from a scores file. ``fraction`` of the
    training samples, rounded up, are returned. Columns are the same as for ``most_harmful``.
    """
    score = _help_minus_harm(train)
    row_of = {sample_id: row for row, sample_id in enumerate(train["id"])}
    helpful = top_influences.loc[top_influences["score"] > 0].sort_values("rank", kind="stable")
    by_target = helpful.groupby("target_id", sort=False)["train_id"]
    queues = [iter([row_of[i] for i in ids]) for _, ids in by_target]
    taken: dict[int, None] = {}
    while queues:
        remaining = []
        for queue in queues:
            row = next((row for row in queue if row not in taken), None)
            if row is not None:
                taken[row] = None
                remaining.append(queue)
        queues = remaining
    order = [*taken, *(row for row in np.argsort(-score, kind="stable") if row not in taken)]
    return _by_score(train, np.array(order[: int(np.ceil(fraction * len(train)))]), score)


def most_consistent(train: pd.DataFrame, fraction: float) -> pd.DataFrame:
    """Return the training samples with the largest (help - harm) / (help + harm).

    This is for regression, where some targets need a larger f and others a smaller one. A training
    label that is much too large helps the first kind of target most, and harms the second kind
    equally. The ratio does not depend on the size of the error. Arguments and columns are the same
    as for ``best_in_turn``.
    """
    score = _help_minus_harm(train)
    size = train["help"].to_numpy(np.float64) + train["harm"].to_numpy(np.float64)
    ratio = score / np.where(size > 0, size, 1)
    kept = np.argsort(-ratio, kind="stable")[: int(np.ceil(fraction * len(train)))]
    return _by_score(train, kept, score)


def _help_minus_harm(train: pd.DataFrame) -> np.ndarray:
    return train["help"].to_numpy(dtype=np.float64) - train["harm"].to_numpy(dtype=np.float64)


def _by_score(train: pd.DataFrame, order: np.ndarray, score: np.ndarray) -> pd.DataFrame:
    table = train.drop(columns="harmed_label", errors="ignore").assign(score=score)
    return _ranked(table, order, "score")


def nearest(
    features: Rows | np.ndarray, others: np.ndarray, *, block: int, first: int | None = None
) -> Extremes:
    """Return the five rows of ``features`` with the largest cosines to each row of ``others``.

    Features have shape (n, k), and ``block`` rows are read at a time. ``others`` has shape (m, k).
    The result has shape (5, m), float32, or fewer rows if n is smaller. If ``others`` are also rows
    of ``features``, ``first`` is the number of the first of these rows, and a row is not its own
    neighbour.
    """
    unit = unit_rows(others).T.astype(np.float32)
    extremes: Extremes | None = None
    for start in range(0, len(features), block):
        cosines = unit_rows(features[start : start + block]).astype(np.float32) @ unit
        if first is not None:
            stop = start + len(cosines)
            own = np.arange(max(start, first), min(stop, first + others.shape[0]))
            cosines[own - start, own - first] = -np.inf
        extremes = largest(extremes, start, cosines, _NEIGHBOURS)
    assert extremes is not None
    return extremes


def copies(
    neighbours: Extremes, same_id: np.ndarray | int = -1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the samples that have a copy among the rows, the copies, cosines and closeness.

    Let d_i be the distance (1 minus the cosine) to the i-th nearest row. The closeness of the
    nearest row is 1 - d_1 / d_5. The row is a copy if its closeness is at least 0.9.

    ``same_id`` is, for each sample, the row with its id and label, or -1. If its features are equal
    too, the sample is that row and is left out. Equal ids are not enough, because training samples
    and targets can both be numbered from 0.
    """
    cosines = np.minimum(neighbours.scores.astype(np.float64), 1)
    # The cosine with a sample's own row is -inf, and there can be fewer than five rows.
    last = np.isfinite(cosines).sum(axis=0) - 1
    farthest = np.take_along_axis(cosines, np.maximum(last, 0)[None], axis=0)[0]
    distance = 1 - cosines[0]
    closeness = np.where(distance < _SAME, 1.0, 1 - distance / np.maximum(1 - farthest, _SAME))
    is_row = ((neighbours.rows == same_id) & (1 - cosines < _SAME)).any(axis=0)
    pairs = np.flatnonzero((last >= 0) & (closeness >= _CLOSE) & ~is_row)
    return pairs, neighbours.rows[0, pairs], cosines[0, pairs], closeness[pairs]

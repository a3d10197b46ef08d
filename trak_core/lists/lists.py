"""List training samples that help, that harm, that may have wrong labels, or that are copies."""

import numpy as np
import pandas as pd

from trak_core.artifacts import Rows
from trak_core.attribution.score_formulas import Extremes, largest, unit_rows

# A copy is much nearer to a sample than the sample's fifth-nearest neighbour. See ``copies``.
_N_NEIGHBOURS, _MIN_CLOSENESS = 5, 0.9
# Features are float32, so smaller cosine distances can be rounding errors and count as 0.
_MIN_DISTANCE = 1e-5

# With fewer targets, the order of the suspects depends strongly on which targets were chosen.
ENOUGH_TARGETS = 100


def _ranked(train: pd.DataFrame, order: np.ndarray, *first_columns: str) -> pd.DataFrame:
    """Return rows of a table in the given order, with a column ``rank`` and some columns first."""
    rows = train.iloc[order].reset_index(drop=True)
    rows["rank"] = np.arange(1, len(rows) + 1)
    first = ["id", "rank", *(name for name in first_columns if name in rows)]
    return rows[[*first, *(name for name in rows if name not in first)]]


def suspects(train: pd.DataFrame) -> pd.DataFrame:
    """Return all training samples, with the most harmful first.

    Samples with a wrong label worsen the model output of similar targets. Therefore the most
    harmful samples are likely to have wrong labels, if most labels of the targets are right.

    The columns are ``id``, ``rank``, ``worth_a_look``, ``suggested_label``, ``harm``, ``help`` and
    the other columns of ``train``, a table of a scores file. ``worth_a_look`` is 1 if the harm
    exceeds the help, which does not prove that the label is wrong.

    Source: docs/how-to/lists.md, "Help and harm".
    """
    table = train.rename(columns={"harmed_label": "suggested_label"})
    table["worth_a_look"] = (table["harm"] > table["help"]).astype(np.int64)
    order = np.argsort(-table["harm"].to_numpy(), kind="stable")
    return _ranked(table, order, "worth_a_look", "suggested_label", "harm", "help")


def most_harmful(train: pd.DataFrame) -> pd.DataFrame:
    """Return the training samples that harm targets more than they help.

    The most harmful samples come first. The columns are ``id``, ``rank``, ``score`` (help minus
    harm, which is negative), and the other columns of ``train``, a table of a scores file.
    """
    score = _help_minus_harm(train)
    order = np.argsort(score, kind="stable")[: int((score < 0).sum())]
    return _by_score(train, order, score)


def best_in_turn(
    train: pd.DataFrame, top_influences: pd.DataFrame, fraction: float
) -> pd.DataFrame:
    """Return the most helpful ``fraction`` of the training samples, which targets choose in turn.

    In each turn, every target chooses the best of its top influences that no target has chosen.
    The result therefore helps all kinds of targets, whereas the samples with the largest help minus
    harm can be very similar to each other. When no target has influences left to choose, the
    remaining samples follow in the order of help minus harm.

    The two tables are from a scores file in which a positive score means that a sample improves the
    target. The number of samples is rounded up. The columns are those of ``most_harmful``.
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
    """Return the ``fraction`` of the training samples with the largest ratio of help to harm.

    Samples are ranked by (help - harm) / (help + harm). This list is for regression, where some
    predictions are too low and others are too high. A training label that is much too large helps
    the targets with low predictions most, but harms the others as much. The ratio does not grow
    with the error of the label, so such a sample is not preferred. The columns are those of
    ``most_harmful``.
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
    features: Rows | np.ndarray, queries: np.ndarray, *, block: int, first: int | None = None
) -> Extremes:
    """Return the five rows of ``features`` with the largest cosine to each row of ``queries``.

    ``features`` have shape (n, k) and ``queries`` have shape (m, k). The results have shape (5, m),
    or (n, m) if n is less than 5. ``block`` rows of ``features`` are read at a time. If ``queries``
    are consecutive rows of ``features``, ``first`` is the number of the first of these rows, and no
    row is returned as its own neighbour.
    """
    unit = unit_rows(queries).T.astype(np.float32)
    extremes: Extremes | None = None
    for start in range(0, len(features), block):
        cosines = unit_rows(features[start : start + block]).astype(np.float32) @ unit
        if first is not None:
            stop = start + len(cosines)
            rows = np.arange(max(start, first), min(stop, first + len(queries)))
            cosines[rows - start, rows - first] = -np.inf
        extremes = largest(extremes, start, cosines, _N_NEIGHBOURS)
    assert extremes is not None
    return extremes


def copies(
    neighbours: Extremes, same_id: np.ndarray | int = -1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the samples that have a copy among the rows of a feature matrix.

    ``neighbours`` is the result of ``nearest`` for the samples. Let d_i be the cosine distance of a
    sample to its i-th nearest row. The nearest row is a copy of the sample if its closeness,
    1 - d_1 / d_5, is at least 0.9.

    ``same_id`` contains, for each sample, the row with the same id and label, or -1. If the
    features of this row are also equal, it is the sample itself, and the sample is left out. Equal
    ids are not enough, because training samples and targets may both be numbered from 0.

    Returns:
        The indices of the samples that have a copy; and, for each of them, the row of the copy, its
        cosine to the sample, and its closeness.
    """
    cosines = np.minimum(neighbours.scores.astype(np.float64), 1)
    # A sample can have fewer than five neighbours. Entries without a neighbour are -inf.
    last = np.isfinite(cosines).sum(axis=0) - 1
    farthest = np.take_along_axis(cosines, np.maximum(last, 0)[None], axis=0)[0]
    distance, spread = 1 - cosines[0], np.maximum(1 - farthest, _MIN_DISTANCE)
    closeness = np.where(distance < _MIN_DISTANCE, 1.0, 1 - distance / spread)
    is_itself = ((neighbours.rows == same_id) & (1 - cosines < _MIN_DISTANCE)).any(axis=0)
    pairs = np.flatnonzero((last >= 0) & (closeness >= _MIN_CLOSENESS) & ~is_itself)
    return pairs, neighbours.rows[0, pairs], cosines[0, pairs], closeness[pairs]

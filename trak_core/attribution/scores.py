"""Turn features into scores, block by block; NumPy only."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trak_core.spec import Combine, ScoresSpec

# So many rows of a thousand targets, and what is made of them, stay in the processor's cache.
_CACHED_ROWS = 256


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows of any float dtype divided by their lengths, float64; a row of zeros stays one.

    Equivalent to ``sklearn.preprocessing.normalize(rows)``.
    """
    rows = rows.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(lengths > 0, lengths, 1)
    return rows


def powered(loss_weights: np.ndarray, power: float) -> np.ndarray:
    """Return sign(Q) |Q|^power of the loss weights Q, shape (n,), float64."""
    weights = loss_weights.astype(np.float64)
    return np.sign(weights) * np.abs(weights) ** power


def similarities(features: np.ndarray, solved_targets: np.ndarray) -> np.ndarray:
    """Return rows of A_c = Phi_c (N + ridge I)^-1 T_c^T, shape (rows, m), float64.

    Features, rows of Phi_c, have shape (rows, k); solved targets, what they are multiplied with,
    (k, m), float64.

    Source: Park et al., "TRAK", ICML 2023, equation 16; docs/explanation/scores.md, "The formula".
    """
    return features.astype(np.float64, copy=False) @ solved_targets


def combined(parts: Iterable[tuple[np.ndarray, np.ndarray, float]], combine: Combine) -> np.ndarray:
    """Average one block of rows over the checkpoints, of which one is held at a time.

    Args:
        parts: For each checkpoint, rows of A_c, shape (rows, m), their Q_c^power, shape (rows,),
            and ||B||, which counts for ``unit_average`` alone; at least one.
        combine: ``product_of_averages``: mean_c(A_c) * mean_c(Q_c^power), TRAK's own;
            ``average_of_products``: mean_c(A_c * Q_c^power); ``unit_average``:
            mean_c(A_c * Q_c^power / ||B||).

    Returns:
        Rows of the scores, shape (rows, m), float64.

    Source: Park et al., "TRAK", ICML 2023, equation 17; docs/explanation/scores.md, "The formula".
    """
    total, weight, n_checkpoints = np.zeros(()), np.zeros(()), 0
    for block, weights, norm in parts:
        size = norm if combine is Combine.UNIT_AVERAGE else 1.0
        is_plain = combine is Combine.PRODUCT_OF_AVERAGES
        term = block if is_plain else block * (weights / size)[:, None]
        total = total + term if n_checkpoints == 0 else np.add(total, term, out=total)
        weight = weight + weights
        n_checkpoints += 1
    if combine is Combine.PRODUCT_OF_AVERAGES:
        total *= (weight / n_checkpoints)[:, None]
    if n_checkpoints > 1:
        total /= n_checkpoints
    return total


def checkpoint_weights(powers: np.ndarray, norms: np.ndarray, combine: Combine) -> np.ndarray:
    """Return how much each checkpoint's A_c[i, j] counts in the score of sample i, (C, n), float64.

    The sum over checkpoints of weights times A_c is what ``combined`` gives. ``powers`` are
    Q_c^power, shape (C, n), and ``norms`` ||B||, shape (C,).
    """
    n_checkpoints = len(powers)
    if combine is Combine.PRODUCT_OF_AVERAGES:
        weights = np.broadcast_to(powers.mean(axis=0), powers.shape)
    elif combine is Combine.UNIT_AVERAGE:
        weights = powers / norms[:, None]
    else:
        weights = powers
    return weights / n_checkpoints


def unit_of(spec: ScoresSpec) -> str:
    """Return the scores' unit in plain words (docs/explanation/scores.md, "What a score says")."""
    is_newtons = spec.weighting == "curvature" and spec.loss_weight_power == 1
    if is_newtons and spec.combine != Combine.UNIT_AVERAGE and not spec.normalize:
        return f"that of the model output ({spec.features.model_output})"
    return "relative: order and ratios within a target mean something, the absolute size does not"


def most_frequent(classes: np.ndarray, labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the class that most checkpoints predict, shape (rows,).

    Two runs that disagree are a tie: it goes to the row's label if ``outputs``, its log-odds, are
    above 0 on average, else to the smallest of the other classes that are as frequent. Classes,
    integers, and outputs have shape (checkpoints, rows), labels (rows,). Memory doesn't grow with
    the number of classes.
    """
    ordered = np.sort(classes, axis=0)
    # The length so far of each run of equal classes.
    run = np.ones(ordered.shape, dtype=np.int32)
    for i in range(1, len(ordered)):
        run[i] += run[i - 1] * (ordered[i] == ordered[i - 1])
    is_frequent, is_label = run == run.max(axis=0), ordered == labels
    is_other = is_frequent & ~is_label
    # The first is the smallest; where there is none, that of row 0 isn't taken.
    others = np.take_along_axis(ordered, is_other.argmax(axis=0)[None], axis=0)[0]
    likely = outputs.mean(axis=0, dtype=np.float64) > 0
    takes_label = (is_frequent & is_label).any(axis=0) & (likely | ~is_other.any(axis=0))
    return np.where(takes_label, labels, others).astype(classes.dtype)


def improving_signs(better: str, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return the sign of -dl/df of each target, l its loss: whether a larger f improves it.

    Those are 1 where ``better`` is ``larger``, and else, for ``closer``, the signs of labels less
    predictions. All of shape (m,), the result int64.
    """
    if better == "larger":
        return np.ones(len(labels), dtype=np.int64)
    return np.sign(labels.astype(np.float64) - predictions).astype(np.int64)


def help_and_harm(scores: np.ndarray, improves: np.ndarray) -> np.ndarray:
    """Return how much each training sample improves targets, and how much it worsens them.

    Both are means over all targets, of rows of scores (rows, m) times signs (m,): of
    ``max(scores * improves, 0)`` and of ``max(-scores * improves, 0)``, shape (rows, 2), float64.
    How rows are cut into blocks changes nothing.
    """
    moved = scores * improves.astype(scores.dtype)
    up = np.maximum(moved, 0).sum(axis=1, dtype=np.float64)
    down = 0 - np.minimum(moved, 0).sum(axis=1, dtype=np.float64)
    return np.stack([up, down], axis=1) / scores.shape[1]


def harmed_class(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the class whose targets each training sample pushes down most, shape (rows,).

    That is the largest mean over a class's targets of ``max(-scores, 0)``; of equal ones the
    smallest class. Scores have shape (rows, m), the targets' labels (m,), integers.
    """
    order = np.argsort(labels, kind="stable")
    classes, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    harmed = []
    for i in range(0, len(scores), _CACHED_ROWS):
        harm = np.maximum(-np.take(scores[i : i + _CACHED_ROWS], order, axis=1), 0)
        means = np.add.reduceat(harm, starts, axis=1, dtype=np.float64) / sizes
        harmed.append(classes[means.argmax(axis=1)])
    return np.concatenate(harmed)


@dataclass(frozen=True, slots=True)
class Extremes:
    """The largest scores of each target seen so far, with the numbers of their rows.

    Both are of shape (kept, m), largest score first; ties go to the earlier row.
    """

    rows: np.ndarray
    scores: np.ndarray


def largest(seen: Extremes | None, start: int, block: np.ndarray, keep: int) -> Extremes:
    """Return the ``keep`` largest entries of every column so far, from one more block of rows.

    Equivalent to sorting whole columns: ``np.argsort(-scores, axis=0, kind="stable")[:keep]``. How
    rows are cut into blocks changes nothing, as long as they come from the top down. ``seen`` holds
    the entries that the blocks before gave, None at the first; the block of scores, shape (rows,
    m), begins at row ``start``. Fewer rows give fewer entries.

    Only what is above the last entry kept is sorted, which is little unless scores rise with rows.
    """
    # The first block is cut: some `keep` of its first half's are among the largest of all of it.
    size = keep if seen is None else len(block)
    if seen is None:
        seen = Extremes(np.empty((0, block.shape[1]), np.int64), block[:0])
    first = 0
    while first < len(block):
        part = block[first : first + size]
        above = part > seen.scores[-1] if len(seen.rows) == keep else None
        if above is None or 2 * np.count_nonzero(above) > above.size:
            rows = np.broadcast_to(np.arange(len(part))[:, None], part.shape)
        else:
            rows, part = _packed(above, part)
        seen = merged(seen, Extremes(start + first + rows, part), keep)
        first += size
        size = first
    return seen


def merged(earlier: Extremes, later: Extremes, keep: int) -> Extremes:
    """Return the ``keep`` largest of every column, of rows and of those that come after them."""
    rows = np.vstack([earlier.rows, later.rows])
    scores = np.vstack([earlier.scores, later.scores])
    # Stable, so that of equal scores the earlier row stays.
    order = np.argsort(-scores, axis=0, kind="stable")[:keep]
    return Extremes(*(np.take_along_axis(values, order, axis=0) for values in (rows, scores)))


def _packed(chosen: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and scores of each column's chosen entries, from the top; -inf fills columns."""
    # A tenth of the time of `np.nonzero` where few are chosen.
    rows, columns = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    order = np.argsort(columns, kind="stable")
    rows, columns = rows[order], columns[order]
    counts = np.bincount(columns, minlength=scores.shape[1])
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = int(counts.max(initial=0)), scores.shape[1]
    packed_rows, packed = np.zeros(shape, np.int64), np.full(shape, -np.inf, scores.dtype)
    packed_rows[places, columns], packed[places, columns] = rows, scores[rows, columns]
    return packed_rows, packed

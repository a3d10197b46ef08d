"""Compute scores, and values that are derived from scores, for blocks of training samples."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trak_core.settings import Combine, ScoresSpec

# For 1,000 targets, this many rows of scores, with temporary copies, fit into a processor's cache.
_CACHED_ROWS = 256


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows divided by their norms, float64. Rows of zeros stay zero."""
    rows = rows.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(lengths > 0, lengths, 1)
    return rows


def powered(loss_weights: np.ndarray, power: float) -> np.ndarray:
    """Return sign(Q) |Q|^power of the loss weights Q, shape (n,), float64."""
    weights = loss_weights.astype(np.float64)
    return np.sign(weights) * np.abs(weights) ** power


def combined(parts: Iterable[tuple[np.ndarray, np.ndarray, float]], combine: Combine) -> np.ndarray:
    """Average a block of scores over checkpoints, with one checkpoint in memory at a time.

    Args:
        parts: For each checkpoint c (at least one), a block of rows of the matrix A_c (see
            ``Attributor``), shape (rows, m); the loss weights Q_c^power of these rows, shape
            (rows,); and the norm ||B_c||, which only ``unit_average`` uses.
        combine: ``product_of_averages``: mean_c(A_c) * mean_c(Q_c^power), as in the paper;
            ``average_of_products``: mean_c(A_c * Q_c^power); ``unit_average``:
            mean_c(A_c * Q_c^power / ||B_c||).

    Returns:
        Rows of the scores, shape (rows, m), float64.

    Source: Park et al., "TRAK", ICML 2023, equation 17.
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


def checkpoint_weights(loss_weights: np.ndarray, norms: np.ndarray, spec: ScoresSpec) -> np.ndarray:
    """Return the weights v of C checkpoints in the scores of n training samples, shape (C, n).

    The scores that ``combined`` computes from matrices A_c are sum_c v[c, i] A_c[i, j] for training
    sample i and target j. ``loss_weights`` have shape (C, n). ``norms``, shape (C,), are used only
    for ``unit_average``.
    """
    powers, combine = powered(loss_weights, spec.loss_weight_power or 1.0), Combine(spec.combine)
    if combine is Combine.PRODUCT_OF_AVERAGES:
        powers = np.broadcast_to(powers.mean(axis=0), powers.shape)
    elif combine is Combine.UNIT_AVERAGE:
        powers = powers / norms[:, None]
    return powers / len(powers)


def unit_of(spec: ScoresSpec) -> str:
    """Return a text that states the unit of scores (see docs/explanation/scores.md)."""
    is_newton_step = spec.weighting == "curvature" and spec.loss_weight_power == 1
    if is_newton_step and spec.combine != Combine.UNIT_AVERAGE and not spec.normalize:
        return f"that of the model output ({spec.features.model_output})"
    return "relative: order and ratios within a target mean something, the absolute size does not"


def most_frequent(classes: np.ndarray, labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the class that most checkpoints predict for each row, shape (rows,).

    If the label is one of several most frequent classes, it is returned if the mean of ``outputs``,
    the log-odds of the label, is above 0. In all other ties, the smallest of the most frequent
    classes other than the label is returned. Predicted ``classes``, which are integers, and
    ``outputs`` have shape (checkpoints, rows). Labels have shape (rows,).
    """
    ordered = np.sort(classes, axis=0)
    # In each sorted column, run[i] is the number of entries up to i that are equal to entry i.
    run = np.ones(ordered.shape, dtype=np.int32)
    for i in range(1, len(ordered)):
        run[i] += run[i - 1] * (ordered[i] == ordered[i - 1])
    is_frequent, is_label = run == run.max(axis=0), ordered == labels
    is_other = is_frequent & ~is_label
    # argmax returns the first maximum, which is the smallest of the most frequent classes other
    # than the label.
    others = np.take_along_axis(ordered, is_other.argmax(axis=0)[None], axis=0)[0]
    likely = outputs.mean(axis=0, dtype=np.float64) > 0
    takes_label = (is_frequent & is_label).any(axis=0) & (likely | ~is_other.any(axis=0))
    return np.where(takes_label, labels, others).astype(classes.dtype)


def improving_signs(better: str, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Return the sign of the scores that reduce each target's loss, shape (m,), int64.

    If ``better`` is ``larger``, the sign is 1. If it is ``closer``, a model output that is closer
    to the label has a smaller loss, and the sign is that of label - prediction.
    """
    if better == "larger":
        return np.ones(len(labels), dtype=np.int64)
    return np.sign(labels.astype(np.float64) - predictions).astype(np.int64)


def help_and_harm(scores: np.ndarray, improves: np.ndarray) -> np.ndarray:
    """Return each training sample's help and harm, averaged over targets.

    The two columns are the means over targets of ``max(scores * improves, 0)`` and of
    ``max(-scores * improves, 0)``. Scores have shape (rows, m). ``improves``, shape (m,), are the
    signs of ``improving_signs``. The result has shape (rows, 2), float64.
    """
    moved = scores * improves.astype(scores.dtype)
    up = np.maximum(moved, 0).sum(axis=1, dtype=np.float64)
    down = 0 - np.minimum(moved, 0).sum(axis=1, dtype=np.float64)
    return np.stack([up, down], axis=1) / scores.shape[1]


def harmed_class(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the class whose targets each training sample harms most, shape (rows,).

    The harm of a class is the mean of ``max(-scores, 0)`` over its targets. A tie goes to the
    smallest class. Scores have shape (rows, m), and the targets' labels, integers, have shape (m,).
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
    """The largest scores of each target, and the rows of the training samples with these scores.

    ``rows`` and ``scores`` have shape (kept, m). In each column, scores descend, and equal scores
    are in the order of their rows.
    """

    rows: np.ndarray
    scores: np.ndarray


def largest(seen: Extremes | None, start: int, block: np.ndarray, keep: int) -> Extremes:
    """Return the ``keep`` largest entries of every column among previous blocks and a new block.

    Blocks must be passed in the order of rows. The rows are then those of
    ``np.argsort(-scores, axis=0, kind="stable")[:keep]`` for all blocks together. Only entries
    above the smallest kept entry are sorted, which are usually few. ``seen`` is the result for the
    previous blocks, or None. ``start`` is the number of the first row of ``block`` (rows, m).
    """
    # The first block is processed in parts of doubling size, so that the largest entries of earlier
    # parts filter the later parts.
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
        rows = np.vstack([seen.rows, start + first + rows])
        scores = np.vstack([seen.scores, part])
        # A stable sort leaves equal scores in the order of their rows.
        order = np.argsort(-scores, axis=0, kind="stable")[:keep]
        seen = Extremes(*(np.take_along_axis(values, order, axis=0) for values in (rows, scores)))
        first += size
        size = first
    return seen


def _packed(chosen: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen entries of each column as a smaller matrix, with the rows they came from.

    Columns with fewer chosen entries than others are filled with -inf.
    """
    # If few entries are chosen, `flatnonzero` is ten times as fast as `nonzero`.
    rows, columns = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    order = np.argsort(columns, kind="stable")
    rows, columns = rows[order], columns[order]
    counts = np.bincount(columns, minlength=scores.shape[1])
    ranks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = int(counts.max(initial=0)), scores.shape[1]
    packed_rows, packed = np.zeros(shape, np.int64), np.full(shape, -np.inf, scores.dtype)
    packed_rows[ranks, columns], packed[ranks, columns] = rows, scores[rows, columns]
    return packed_rows, packed

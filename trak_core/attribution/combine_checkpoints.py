"""Combine the results of checkpoints into tables of the samples and of the largest scores."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from trak_core.attribution.fitted_checkpoint import Part
from trak_core.attribution.score_formulas import (
    Extremes,
    harmed_class,
    help_and_harm,
    improving_signs,
    largest,
    most_frequent,
)
from trak_core.config.memory_needs import CHUNK_ROWS
from trak_core.model_outputs.about_outputs import About

# A block with this many scores stays in the processor's cache while it is processed.
_CACHED_SCORES = 2**21


def fast_rows(n_targets: int) -> int:
    """Return how many rows of scores fit into the processor's cache, in whole chunks of rows."""
    return max(1, _CACHED_SCORES // n_targets // CHUNK_ROWS) * CHUNK_ROWS


def sample_table(parts: Sequence[Part], side: str, block: int) -> dict[str, np.ndarray]:
    """Return a table of the training samples (``side="train"``) or targets (``side="target"``).

    Columns are ``id``, ``label``, ``prediction``, ``output``, ``output_sd`` and, for training
    samples, ``loss_weight``, shape (n,) each. ``parts`` contains the data of each checkpoint.
    ``output`` and ``loss_weight`` are means over checkpoints, and ``output_sd`` is the standard
    deviation of the outputs. ``prediction`` is the class that most checkpoints predict or, if
    predictions are not classes, their mean. ``block`` rows are read at a time.
    """
    ids, labels = (parts[0].vector(f"{side}_{key}") for key in ("ids", "labels"))

    def blocks(key: str) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the rows of each block, and the values of all checkpoints in these rows."""
        for i in range(0, len(ids), block):
            yield slice(i, i + block), np.stack([p.vector(key, i, i + block) for p in parts])

    def averaged(key: str, average: Callable[..., np.ndarray] = np.mean) -> np.ndarray:
        values = [average(values, axis=0, dtype=np.float64) for _, values in blocks(key)]
        return np.concatenate(values).astype(np.float32)

    outputs, predicted = averaged(f"{side}_outputs"), f"{side}_predictions"
    if parts[0].vector(predicted, 0, 1).dtype.kind == "f":
        predictions = averaged(predicted)
    else:
        predictions = np.concatenate([
            most_frequent(classes, labels[rows], outputs[None, rows])
            for rows, classes in blocks(predicted)
        ])
    table = {"id": ids, "label": labels, "prediction": predictions, "output": outputs}
    table["output_sd"] = averaged(f"{side}_outputs", np.std)
    return table | ({"loss_weight": averaged("loss_weights")} if side == "train" else {})


def add_improving_signs(targets: dict[str, np.ndarray], about: About) -> None:
    """Add the column ``improves``: the sign of the scores that reduce each target's loss.

    If ``about.better`` is empty, the sign is unknown, and no column is added.
    """
    if about.better:
        compared = targets["label"], targets["prediction"]
        targets["improves"] = improving_signs(about.better, *compared)


@dataclass(frozen=True, slots=True)
class KeptScores:
    """A summary of the scores of all training samples for all targets.

    ``positive`` contains the largest scores of each target. ``negative`` contains the lowest
    scores, multiplied by -1. ``by_sample`` contains the columns ``help``, ``harm`` and
    ``harmed_label`` of the training samples, shape (n,) each, or only those that are known.
    """

    positive: Extremes
    negative: Extremes
    by_sample: dict[str, np.ndarray]

    @classmethod
    def of(
        cls,
        blocks: Iterable[tuple[int, np.ndarray]],
        improves: np.ndarray | None,
        labels: np.ndarray | None,
        top: int,
    ) -> Self:
        """Return a summary with the ``top`` scores of each sign for each target.

        A block consists of the number of its first row, and of scores (rows, m). ``improves`` are
        the signs of the scores that reduce each target's loss, shape (m,), or None if they are
        unknown. ``labels`` are the targets' classes, shape (m,), or None.
        """
        positive = negative = None
        by_sample: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        for start, scores in blocks:
            if improves is not None:
                both = help_and_harm(scores, improves).astype(np.float32)
                by_sample["help"].append(both[:, 0])
                by_sample["harm"].append(both[:, 1])
            if labels is not None:
                by_sample["harmed_label"].append(harmed_class(scores, labels))
            positive = largest(positive, start, scores, top)
            negative = largest(negative, start, -scores, top)
        assert positive is not None
        assert negative is not None
        return cls(positive, negative, {k: np.concatenate(v) for k, v in by_sample.items()})


def influence_table(
    kept: KeptScores, train: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a table of each target's largest positive and lowest negative scores."""
    positive, negative = kept.positive, kept.negative
    # The axes are target, sign and rank, so that np.nonzero sorts the table in this order.
    rows = np.stack([positive.rows.T, negative.rows.T], axis=1)
    sizes = np.stack([positive.scores.T, negative.scores.T], axis=1)
    is_kept = sizes > 0
    target, sign, rank = np.nonzero(is_kept)
    signs, train_rows = np.array([1, -1])[sign], rows[is_kept]
    return {
        "target_id": targets["id"][target],
        "rank": rank + 1,
        "sign": signs,
        "train_id": train["id"][train_rows],
        "train_label": train["label"][train_rows],
        "score": (signs * sizes[is_kept]).astype(np.float32),
    }

"""Summarize scores over checkpoints: tables of samples, and the largest scores of each target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import numpy as np

from trak_core.artifacts import Artifact, Writer
from trak_core.attribution.fitted_checkpoint import Part
from trak_core.attribution.score_formulas import (
    Extremes,
    harmed_class,
    help_and_harm,
    improving_signs,
    largest,
    merged,
    most_frequent,
)
from trak_core.config.memory_needs import CHUNK_ROWS
from trak_core.model_outputs.about_outputs import About

# The number of scores in a block that stays in the processor's cache from one step to the next.
_FAST_SCORES = 2**21

Summary = Callable[[np.ndarray], np.ndarray]


def fast_rows(n_targets: int) -> int:
    """Return the number of rows of scores that fit into the cache, a multiple of CHUNK_ROWS."""
    return max(1, _FAST_SCORES // n_targets // CHUNK_ROWS) * CHUNK_ROWS


def mean(numbers: np.ndarray) -> np.ndarray:
    """Return the mean over checkpoints, which are the first axis, in float32."""
    return numbers.mean(axis=0, dtype=np.float64).astype(np.float32)


def _sd(numbers: np.ndarray) -> np.ndarray:
    return numbers.std(axis=0, dtype=np.float64).astype(np.float32)


def summarized(
    parts: Sequence[Part], key: str, n_samples: int, block: int, *summaries: Summary
) -> list[np.ndarray]:
    """Apply functions to the vectors ``key`` of all parts. Return arrays of shape (n,)."""
    blocks: list[list[np.ndarray]] = [[] for _ in summaries]
    for start in range(0, n_samples, block):
        values = np.stack([part.vector(key, start, start + block) for part in parts])
        for summary, done in zip(summaries, blocks, strict=True):
            done.append(summary(values))
    return [np.concatenate(done) for done in blocks]


def sample_table(parts: Sequence[Part], side: str, block: int) -> dict[str, np.ndarray]:
    """Return the table of training samples (``side`` is ``train``) or of targets (``target``).

    Columns are ``id``, ``label``, ``prediction``, ``output`` and ``output_sd``, shape (n,) each.
    ``output`` is the mean over checkpoints, and ``output_sd`` the standard deviation. A predicted
    class is the class that most checkpoints predict. Predictions that are not classes are averaged.
    """
    ids, labels = parts[0].vector(f"{side}_ids"), parts[0].vector(f"{side}_labels")
    outputs, spreads = summarized(parts, f"{side}_outputs", len(ids), block, mean, _sd)
    key = f"{side}_predictions"
    if parts[0].vector(key, 0, 1).dtype.kind == "f":
        (predictions,) = summarized(parts, key, len(ids), block, mean)
    else:
        predictions = np.concatenate([
            most_frequent(
                np.stack([part.vector(key, i, i + block) for part in parts]),
                labels[i : i + block],
                outputs[None, i : i + block],
            )
            for i in range(0, len(ids), block)
        ])
    columns = {"id": ids, "label": labels, "prediction": predictions}
    return {**columns, "output": outputs, "output_sd": spreads}


def add_improving_signs(targets: dict[str, np.ndarray], about: About, *, is_mean: bool) -> None:
    """Add the column ``improves``, the sign of scores that improve each target, if it is known.

    It is unknown for a mean of targets, which has no label, unless ``about.better`` is ``larger``.
    """
    if about.better and (about.better == "larger" or not is_mean):
        compared = targets["label"], targets["prediction"]
        targets["improves"] = improving_signs(about.better, *compared)


@dataclass(frozen=True, slots=True)
class KeptScores:
    """A summary of the scores of some training samples for all targets.

    ``helpful`` and ``harmful`` are the largest scores and negated scores of each target, or None
    without training samples. ``by_sample`` contains ``help``, ``harm`` and ``harmed_label`` if they
    are known, shape (rows,) each.
    """

    helpful: Extremes | None
    harmful: Extremes | None
    by_sample: dict[str, np.ndarray]

    @classmethod
    def of(
        cls,
        blocks: Iterable[tuple[int, np.ndarray]],
        improves: np.ndarray | None,
        labels: np.ndarray | None,
        top: int,
    ) -> Self:
        """Return the summary of blocks. A block is its first row number and its scores (rows, m).

        ``improves`` are the signs of the scores that improve each target, shape (m,), or None if
        they are unknown. ``labels`` are the targets' classes, shape (m,), or None.
        """
        helpful = harmful = None
        by_sample: dict[str, list[np.ndarray]] = {}
        if improves is not None:
            by_sample |= {"help": [], "harm": []}
        if labels is not None:
            by_sample["harmed_label"] = []
        for start, mean in blocks:
            if improves is not None:
                both = help_and_harm(mean, improves).astype(np.float32)
                by_sample["help"].append(both[:, 0])
                by_sample["harm"].append(both[:, 1])
            if labels is not None:
                by_sample["harmed_label"].append(harmed_class(mean, labels))
            helpful = largest(helpful, start, mean, top)
            harmful = largest(harmful, start, -mean, top)
        return cls(helpful, harmful, _joined(by_sample))

    @classmethod
    def of_shards(cls, shards: Sequence[Artifact], top: int) -> Self:
        """Combine the summaries of non-empty shards, which must be in the order of their rows."""
        keys = [key for key in ("help", "harm", "harmed_label") if shards[0].has(key)]
        by_sample = {key: [shard.vector(key) for shard in shards] for key in keys}

        def extremes(key: str) -> Extremes:
            parts = (Extremes(s.matrix(f"{key}_rows")[:], s.matrix(key)[:]) for s in shards)
            return reduce(lambda seen, part: merged(seen, part, top), parts)

        return cls(extremes("helpful"), extremes("harmful"), _joined(by_sample))

    def write(self, writer: Writer, targets: np.ndarray) -> None:
        """Write the summary to the file of a shard."""
        for key, values in self.by_sample.items():
            writer.vector(key, values)
        for key, seen in (("helpful", self.helpful), ("harmful", self.harmful)):
            if seen is not None:
                ranks = np.arange(len(seen.rows))
                writer.matrix(key, ranks, targets)[:] = seen.scores
                writer.matrix(f"{key}_rows", ranks, targets, dtype=np.int64)[:] = seen.rows


def _joined(blocks: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate(parts or [np.empty(0)]) for key, parts in blocks.items()}


def influence_table(
    kept: KeptScores, train: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the table of each target's largest positive and negative scores, without zeros."""
    helpful, harmful = kept.helpful, kept.harmful
    assert helpful is not None
    assert harmful is not None
    # Axes are (target, sign, rank), which is the order of the table.
    rows = np.stack([helpful.rows.T, harmful.rows.T], axis=1)
    sizes = np.stack([helpful.scores.T, harmful.scores.T], axis=1)
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

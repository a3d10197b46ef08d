"""Compute subset sums of simpler scores, which are the baselines of an evaluation.

These scores are label equality, random noise, cosines of embeddings, inner products of gradients,
and BM25 scores of texts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from trak_core.attribution.score_formulas import powered, unit_rows
from trak_core.evaluation.subset_sums import (
    Blocks,
    CheckpointRows,
    read_blocks,
    subset_sums,
    weighted_sums,
)

# Seed of the random baseline.
_SEED = 0
# BM25's usual constants k1 (saturation of word counts) and b (correction for the text's length).
_K1, _B = 1.2, 0.75


def label_sums(
    masks: np.ndarray, train_labels: np.ndarray, target_labels: np.ndarray, block: int
) -> np.ndarray:
    """Return subset sums of scores that are 1 if a sample has the target's label, and else 0."""

    def same(start: int, stop: int) -> np.ndarray:
        return train_labels[start:stop, None] == target_labels

    return subset_sums(masks, read_blocks(same, len(train_labels), block))


def random_sums(masks: np.ndarray, n_targets: int, block: int) -> np.ndarray:
    """Return subset sums of random scores, drawn from a normal distribution."""
    rng = np.random.default_rng(_SEED)

    def draw(start: int, stop: int) -> np.ndarray:
        return rng.standard_normal((stop - start, n_targets))

    return subset_sums(masks, read_blocks(draw, masks.shape[1], block))


def cosine_sums(masks: np.ndarray, train: Blocks, target_embeddings: np.ndarray) -> np.ndarray:
    """Return subset sums of cosines between embeddings of training samples and of targets.

    Blocks in ``train`` have shape (rows, width), and ``target_embeddings`` (m, width). A cosine
    with an embedding of zeros is 0.
    """
    directions = ((start, stop, unit_rows(rows)) for start, stop, rows in train)
    return subset_sums(masks, directions) @ unit_rows(target_embeddings).T


@dataclass(frozen=True, slots=True)
class Bm25:
    """An index of training texts by their words.

    ``entries`` maps each word to its number, the texts that contain it, and the terms that it adds
    to the scores of those texts (float64).
    """

    n_texts: int
    entries: Mapping[str, tuple[int, np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, texts: Iterable[Iterable[str]]) -> Self:
        """Build the index from the words of each text."""
        counts = [Counter(words) for words in texts]
        lengths = np.array([words.total() for words in counts])
        relative = lengths / max(lengths.mean(), 1)
        containing: dict[str, list[int]] = {}
        for text, words in enumerate(counts):
            for word in words:
                containing.setdefault(word, []).append(text)
        entries = {}
        for number, (word, rows) in enumerate(containing.items()):
            times = np.array([counts[text][word] for text in rows])
            rarity = np.log1p((len(counts) - len(rows) + 0.5) / (len(rows) + 0.5))
            # rarity * tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length)), for tf = times
            lengthened = times + _K1 * (1 - _B + _B * relative[rows])
            entries[word] = number, np.array(rows), rarity * times * (_K1 + 1) / lengthened
        return cls(len(counts), entries)

    def scores(self, query: Iterable[str]) -> np.ndarray:
        """Return the scores of all texts for the words of a query, shape (n,), float64, >= 0.

        A word that the query repeats counts once.

        Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond",
            2009, section 3, with log(1 + (n - df + 0.5) / (df + 0.5)), which is never negative.
        """
        values = np.zeros(self.n_texts)
        known = [self.entries[word] for word in set(query) if word in self.entries]
        # The order is fixed, because the rounding of sums depends on it.
        for _, rows, weights in sorted(known, key=lambda entry: entry[0]):
            values[rows] += weights
        return values


def gradient_dot_sums(masks: np.ndarray, checkpoint: CheckpointRows) -> np.ndarray:
    """Return subset sums of Q_i <phi_i, t_j>, which are TracIn's scores without a learning rate.

    Source: Pruthi et al., "Estimating Training Data Influence by Tracing Gradient Descent",
        NeurIPS 2020.
    """
    weights = [powered(checkpoint.loss_weights, 1.0)]
    sums, _ = weighted_sums(masks, weights, checkpoint.blocks())
    return sums[0] @ checkpoint.target_features.T

"""Sum what simpler rules say over subsets of training samples: baselines of an evaluation.

They are labels, noise, embeddings, gradients without a solve, and shared words. NumPy only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from trak_core.attribution.scores import powered, unit_rows
from trak_core.evaluation.subset_sums import (
    Blocks,
    CheckpointRows,
    read_blocks,
    subset_sums,
    weighted_sums,
)

# Seed of the random baseline.
_SEED = 0
# BM25's usual constants: how soon a word that comes again counts no more, and how much lengths do.
_K1, _B = 1.2, 0.75


def label_sums(
    masks: np.ndarray, train_labels: np.ndarray, target_labels: np.ndarray, block: int
) -> np.ndarray:
    """Return subset sums of 1 for training samples of the target's label and 0 for others."""

    def same(start: int, stop: int) -> np.ndarray:
        return train_labels[start:stop, None] == target_labels

    return subset_sums(masks, read_blocks(same, len(train_labels), block))


def random_sums(masks: np.ndarray, n_targets: int, block: int) -> np.ndarray:
    """Return subset sums of scores drawn from a normal distribution, which mean nothing."""
    rng = np.random.default_rng(_SEED)

    def draw(start: int, stop: int) -> np.ndarray:
        return rng.standard_normal((stop - start, n_targets))

    return subset_sums(masks, read_blocks(draw, masks.shape[1], block))


def cosine_sums(masks: np.ndarray, train: Blocks, target_embeddings: np.ndarray) -> np.ndarray:
    """Return subset sums of cosines between embeddings, shape (rows, width) and (m, width).

    A zero embedding has cosine 0 with everything.
    """
    directions = ((start, stop, unit_rows(rows)) for start, stop, rows in train)
    return subset_sums(masks, directions) @ unit_rows(target_embeddings).T


@dataclass(frozen=True, slots=True)
class Bm25:
    """Training texts by their words, to be searched.

    Attributes:
        n_texts: n.
        numbers: The words' numbers.
        ends: Where each word's entries end in what follows; an entry is a text that has the word.
        texts: The entries' texts.
        weights: What the word adds to the score of a question that has it, float64.
    """

    n_texts: int
    numbers: Mapping[str, int]
    ends: np.ndarray
    texts: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[Iterable[str]]) -> Self:
        """Count the words of each text."""
        numbers: dict[str, int] = {}
        words = [np.array([numbers.setdefault(w, len(numbers)) for w in t], int) for t in texts]
        lengths = np.array([len(own) for own in words])
        pairs = np.concatenate([own * len(words) + i for i, own in enumerate(words)])
        pairs, times = np.unique(pairs, return_counts=True)
        word, text = np.divmod(pairs, len(words))
        containing = np.bincount(word, minlength=len(numbers))
        rare = np.log1p((len(words) - containing + 0.5) / (containing + 0.5))
        relative = lengths[text] / max(lengths.mean(), 1)
        weights = rare[word] * times * (_K1 + 1) / (times + _K1 * (1 - _B + _B * relative))
        return cls(len(words), numbers, np.cumsum(containing), text, weights)

    def scores(self, question: Iterable[str]) -> np.ndarray:
        """Return the scores of all texts for one question, shape (n,), float64, none negative.

        A word of the question counts once.

        Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond",
            2009, section 3, with log(1 + (n - df + 0.5) / (df + 0.5)), which is never negative.
        """
        values = np.zeros(self.n_texts)
        for number in sorted({self.numbers[w] for w in question if w in self.numbers}):
            own = slice(self.ends[number - 1] if number else 0, self.ends[number])
            values[self.texts[own]] += self.weights[own]
        return values


def gradient_dot_sums(masks: np.ndarray, checkpoint: CheckpointRows) -> np.ndarray:
    """Return subset sums of Q_i <phi_i, t_j>, TracIn's scores without a learning rate.

    Source: Pruthi et al., "Estimating Training Data Influence by Tracing Gradient Descent",
        NeurIPS 2020.
    """
    weights = [powered(checkpoint.loss_weights, 1.0)]
    sums, _ = weighted_sums(masks, weights, checkpoint.blocks())
    return sums[0] @ checkpoint.target_features.T

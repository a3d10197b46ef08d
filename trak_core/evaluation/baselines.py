"""Compute the baselines of an evaluation: simpler scores than those of TRAK.

The baselines are label equality, random numbers, inner products of gradients, and BM25 scores of
texts. A *subset sum* is the sum of a target's scores over a subset of the training samples.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from trak_core.attribution.fitted_checkpoint import ReadRows
from trak_core.attribution.score_formulas import powered
from trak_core.evaluation.subset_sums import subset_sums, weighted_sums

# The seed of the random scores.
_SEED = 0
# The usual constants of BM25: k1 limits the effect of repeated words, and b that of a long text.
_K1, _B = 1.2, 0.75


def label_sums(
    masks: np.ndarray, train_labels: np.ndarray, target_labels: np.ndarray, block: int
) -> np.ndarray:
    """Return the number of training samples with the target's label in each subset.

    This is the sum of scores that are 1 for samples with the target's label, else 0.
    """
    return subset_sums(masks, lambda i, j: train_labels[i:j, None] == target_labels, block)


def random_sums(masks: np.ndarray, n_targets: int, block: int) -> np.ndarray:
    """Return the sums over subsets of random scores from a standard normal distribution."""
    rng = np.random.default_rng(_SEED)
    return subset_sums(masks, lambda i, j: rng.standard_normal((j - i, n_targets)), block)


def gradient_dot_sums(
    masks: np.ndarray,
    loss_weights: np.ndarray,
    read: ReadRows,
    target_features: np.ndarray,
    block: int,
) -> np.ndarray:
    """Return the sums over subsets of loss-weighted products of training and target features.

    These inner products are the scores of TracIn without a learning rate. ``CheckpointRows``
    describes the arguments.

    Source: Pruthi et al., "Estimating Training Data Influence by Tracing Gradient Descent",
        NeurIPS 2020.
    """
    sums, _ = weighted_sums(masks, [powered(loss_weights, 1.0)], read, block)
    return sums[0] @ target_features.T


def bm25_scores(
    texts: Iterable[Iterable[str]], queries: Iterable[Iterable[str]]
) -> Iterator[np.ndarray]:
    """Yield the BM25 scores of all n texts for each query, shape (n,), float64.

    Each text and each query is a sequence of words. A word that a query repeats counts once. Scores
    are not negative.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009,
        section 3, with log(1 + (n - df + 0.5) / (df + 0.5)), which is never negative.
    """
    counts = [Counter(words) for words in texts]
    lengths = np.array([words.total() for words in counts])
    relative = lengths / max(lengths.mean(), 1)
    containing: dict[str, list[int]] = {}
    for text, words in enumerate(counts):
        for word in words:
            containing.setdefault(word, []).append(text)
    # For each word: its number, the texts that contain it, and its contributions to their scores.
    entries: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}
    for number, (word, rows) in enumerate(containing.items()):
        times = np.array([counts[text][word] for text in rows])
        rarity = np.log1p((len(counts) - len(rows) + 0.5) / (len(rows) + 0.5))
        # The contribution is rarity * tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length)),
        # where tf is the number of times that the text contains the word.
        lengthened = times + _K1 * (1 - _B + _B * relative[rows])
        entries[word] = number, np.array(rows), rarity * times * (_K1 + 1) / lengthened
    for query in queries:
        scores = np.zeros(len(counts))
        known = [entries[word] for word in set(query) if word in entries]
        # Words are added in the order of their numbers, because the order affects rounding.
        for _, rows, added in sorted(known, key=lambda entry: entry[0]):
            scores[rows] += added
        yield scores

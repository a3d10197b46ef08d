"""Compute scores of texts from inner products of gradients, and by shared words.

Rows and columns of the inner products are the training texts, followed by the questions.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer

from trak_core.evaluation.baselines import bm25_scores


@dataclass(frozen=True)
class Way:
    """A method to compute scores from inner products.

    Attributes:
        damping: The damping relative to the mean squared norm; None for scores without an inverse.
        normalize: Whether training gradients have length 1, in the normal matrix too.
        power: The power of the loss weights.
        is_unit_average: Whether each checkpoint's scores are divided by the norm of the training
            samples' scores.
    """

    damping: float | None = 2.0
    normalize: bool = False
    power: float = 0.75
    is_unit_average: bool = True

    def scores(self, kernel: np.ndarray, outputs: np.ndarray, n: int) -> np.ndarray:
        """Return one checkpoint's contribution to the scores, shape (n, m).

        Args:
            kernel: Inner products of all rows, shape (N, N), or at least (n, N).
            outputs: f of all rows.
            n: The number of training texts.
        """
        solved = kernel[:n].astype(float)
        if self.normalize:
            sizes = np.sqrt(np.diagonal(solved))
            solved[:, :n] /= sizes
            solved /= sizes[:, None]
        if self.damping is not None:
            own = solved[:, :n]
            shift = self.damping * np.trace(own) / n
            solved = np.linalg.solve(own + shift * np.eye(n), solved)
        weights = (1 / (1 + np.exp(outputs[:n]))) ** self.power
        solved = weights[:, None] * solved
        norm = np.linalg.norm(solved[:, :n]) if self.is_unit_average else 1.0
        return solved[:, n:] / norm


def bm25(texts: list[list[str]], questions: list[list[str]]) -> np.ndarray:
    """Return BM25's scores, shape (texts, questions)."""
    return np.stack(list(bm25_scores(texts, questions)), axis=1)


def tf_idf(texts: list[list[str]], questions: list[list[str]]) -> np.ndarray:
    """Return cosines of scikit-learn's TF-IDF, shape (texts, questions)."""
    joined = [" ".join(text) for text in texts]
    made = TfidfVectorizer(token_pattern=r"\S+").fit(joined)
    asked = made.transform([" ".join(question) for question in questions])
    return (made.transform(joined) @ asked.T).toarray()


def cosines(kernel: np.ndarray, n: int) -> np.ndarray:
    """Return cosines between training texts and questions, (n, m), from inner products (N, N)."""
    sizes = np.sqrt(np.diagonal(kernel))
    return kernel[:n, n:] / np.outer(sizes[:n], sizes[n:])

"""Ways to score training texts for questions: baselines, and options of the damped scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from planted_products import Products
from sklearn.feature_extraction.text import TfidfVectorizer

from trak_core.evaluation.baselines import Bm25
from trak_core.study.study import Study

TRAK = "TRAK, 2"  # and its damping


@dataclass(frozen=True)
class Scored:
    """Scores of every training text for every question, and what they are compared with."""

    way: str
    scores: np.ndarray
    beside: str = TRAK


@dataclass(frozen=True)
class Way:
    """A way from inner products to scores.

    Attributes:
        damping: lambda in units of the mean squared norm; None for no inverse at all.
        normalize: "" for none; "before": gradients of length 1 in the normal matrix too; "after":
            scores divided by the training gradient's length; "inverse": by its length under the
            inverse, sqrt(phi^T M^-1 phi); "both": cosines.
        all_words: All words of the questions count, not the answer alone.
        is_unit_average: Whether checkpoints are divided by their norm N_c.
    """

    damping: float | None = 2.0
    normalize: str = ""
    all_words: bool = False
    power: float = 0.75
    is_unit_average: bool = True

    def scores(self, kernel: np.ndarray, outputs: np.ndarray, n: int, m: int) -> np.ndarray:
        """Return one checkpoint's share of the scores, shape (n, m).

        Args:
            kernel: Inner products of all rows.
            outputs: f of all rows.
            n: Training texts.
            m: Questions.
        """
        first = n + m * self.all_words
        rows = np.r_[0:n, first : first + m]
        kernel, sizes = kernel[:n, rows].astype(float), np.sqrt(np.diagonal(kernel)[rows])
        if self.normalize in ("before", "both"):
            # A target's own length changes no rank within a checkpoint.
            kernel /= (
                sizes[:n, None]
                * np.r_[sizes[:n], sizes[n:] if self.normalize == "both" else np.ones(m)]
            )
        solved = kernel
        if self.damping is not None:
            own = kernel[:, :n]
            shift = self.damping * np.trace(own) / n
            solved = np.linalg.solve(own + shift * np.eye(n), kernel)
        weights = (1 / (1 + np.exp(outputs[:n]))) ** self.power
        if self.normalize == "after":
            weights = weights / sizes[:n]
        elif self.normalize == "inverse":
            weights = weights / np.sqrt(np.diagonal(solved))
        solved = weights[:, None] * solved
        norm = np.linalg.norm(solved[:, :n]) if self.is_unit_average else 1.0
        return solved[:, n:] / norm


_COSINE = Way(None, "both", power=0, is_unit_average=False)


def bm25(texts: list[list[str]], questions: list[list[str]]) -> np.ndarray:
    """Return BM25's scores, shape (texts, questions)."""
    index = Bm25.of(texts)
    return np.stack([index.scores(question) for question in questions], axis=1)


def tf_idf(texts: list[list[str]], questions: list[list[str]]) -> np.ndarray:
    """Return cosines of scikit-learn's TF-IDF, shape (texts, questions)."""
    joined = [" ".join(text) for text in texts]
    made = TfidfVectorizer(token_pattern=r"\S+").fit(joined)
    asked = made.transform([" ".join(question) for question in questions])
    return (made.transform(joined) @ asked.T).toarray()


def sketch_by_layer(sketches: np.ndarray, n: int, m: int, damping: float) -> np.ndarray:
    """Return sums over layers of phi_l^T (Phi_l^T Phi_l + lambda_l I)^-1 t_l, shape (n, m)."""
    total = np.zeros((n, m))
    for layer in sketches.astype(float):
        train, targets = layer[:n], layer[n : n + m]
        normal = train.T @ train
        shift = damping * np.trace(normal) / len(normal)
        total += train @ np.linalg.solve(normal + shift * np.eye(len(normal)), targets.T)
    return total


def side_by_side(sketches: np.ndarray) -> np.ndarray:
    """Return inner products of the rows' sketches of all layers, side by side."""
    return (sketches @ sketches.transpose(0, 2, 1)).sum(axis=0)


def cosines(rows: np.ndarray, n: int, m: int) -> np.ndarray:
    """Return cosines of training texts and questions, shape (n, m)."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit[:n] @ unit[n : n + m].T


Share = Callable[[Products], np.ndarray]


def ways(study: Study, made: Mapping[tuple[int, int], Products]) -> list[Scored]:
    """Return all ways' scores.

    Args:
        study: The planted facts.
        made: Products of checkpoints, by seed and time.
    """
    texts = [study.module.words(text) for text in study.module.training_texts().values()]
    asked = [study.module.words(text) for text, _ in study.module.questions().values()]
    n, m = len(texts), len(asked)
    last = max(at for _, at in made)

    def mean(one: Share, *, ends: bool = False) -> np.ndarray:
        return np.mean([one(x) for (_, at), x in made.items() if at == last or not ends], axis=0)

    def exact(way: Way, *groups: str) -> Share:
        return lambda one: way.scores(one.whole(groups), one.outputs, n, m)

    def adam(way: Way) -> Share:
        return lambda one: way.scores(one.adam, one.outputs, n, m)

    def projected(way: Way) -> Share:
        return lambda one: way.scores(one.projected @ one.projected.T, one.outputs, n, m)

    def sketched(way: Way) -> Share:
        return lambda one: way.scores(side_by_side(one.sketches), one.outputs, n, m)

    def by_layer(damping: float) -> Share:
        return lambda one: sketch_by_layer(one.sketches, n, m, damping)

    sides = "LoGra 16 x 16"
    baselines = {
        TRAK: mean(exact(Way())),
        "TF-IDF": tf_idf(texts, asked),
        "BM25": bm25(texts, asked),
        "embedding cosine, mean": mean(lambda one: cosines(one.means, n, m), ends=True),
        "embedding cosine, before the answer": mean(lambda one: cosines(one.ends, n, m), ends=True),
        "gradient dot": mean(exact(Way(None, power=1, is_unit_average=False))),
        "gradient dot, unit average": mean(exact(Way(None))),
        "gradient cosine": mean(exact(_COSINE)),
        f"{sides}, an inverse a layer, 0.1": mean(by_layer(0.1)),
        f"{sides}, an inverse a layer, 0.001": mean(by_layer(0.001)),
        f"{sides}, one inverse, 2": mean(sketched(Way())),
        f"{sides}, one inverse, 0.1": mean(sketched(Way(0.1))),
        "tensor_sketch, k = 4,096": mean(projected(Way())),
        "ends of runs alone": mean(exact(Way()), ends=True),
    }
    found = [Scored(name, scores) for name, scores in baselines.items()]
    dampings = 10.0, 0.5, 0.1, 0.03, 0.01
    found += [Scored(f"TRAK, {damping:g}", mean(exact(Way(damping)))) for damping in dampings]
    for damping in (2.0, 0.1, 0.01):
        options = {
            "normalize before": exact(Way(damping, "before")),
            "normalize before, questions too": exact(Way(damping, "both")),
            "normalize after": exact(Way(damping, "after")),
            "normalize under the inverse": exact(Way(damping, "inverse")),
            "Adam": adam(Way(damping)),
            "Adam, normalize before": adam(Way(damping, "before")),
            "all but word embeddings": exact(
                Way(damping), "positions", "norms", "attention", "MLP"
            ),
            "word embeddings": exact(Way(damping), "words"),
            "attention": exact(Way(damping), "attention"),
            "MLPs": exact(Way(damping), "MLP"),
            "last block": exact(Way(damping), "attention 1", "MLP 1"),
            "all words of the question": exact(Way(damping, all_words=True)),
        }
        beside = f"TRAK, {damping:g}"
        found += [
            Scored(f"{name}, {damping:g}", mean(one), beside) for name, one in options.items()
        ]
    return [
        *found,
        Scored("Adam, no inverse", mean(adam(Way(None))), "gradient dot, unit average"),
        Scored("Adam, cosine", mean(adam(_COSINE)), "gradient cosine"),
    ]

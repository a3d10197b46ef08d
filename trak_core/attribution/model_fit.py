"""Compare the models' predictions for their training samples with a constant guess."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from trak_core.gradients import as_batch
from trak_core.model_outputs.about_outputs import About
from trak_core.model_outputs.model_output import IGNORED, ModelOutput
from trak_core.study.dataset_split import Split

# The number of random samples in which parts of labels are counted, to find the most frequent part.
_MOST_READ = 256
# A smaller fraction of correct classes is doubtful even if a constant guess is right less often.
_FEW_RIGHT = 0.5
_FEWEST = 5  # Classes with fewer samples are not checked for being mistaken for each other.


@dataclass(frozen=True, slots=True)
class Fit:
    """How well the models and a constant guess predict the training samples.

    Attributes:
        measure: Sentences in ASCII that state ``value`` and ``guess``.
        value: The models' fraction of correct predictions, or their R2 for regression. None if all
            labels of a regression are equal.
        guess: The relative frequency of the most frequent label, or the R2 of the mean label, 0.
        is_doubtful: Whether the models are not better than the guess (for classes and parts, by two
            standard errors), predict most classes wrong, or confuse classes with each other.
    """

    measure: str
    value: float | None
    guess: float
    is_doubtful: bool


def fit_of(columns: pd.DataFrame, about: About, train: Split) -> Fit | None:
    """Return how well models fit their training samples, or None if predictions are not labels.

    ``columns`` has the columns ``id``, ``label`` and ``prediction``. Samples of ``train`` are read
    only to determine the guess for labels with several parts.
    """
    labels, predictions = (columns[key].to_numpy() for key in ("label", "prediction"))
    if about.is_own:
        return None  # Predictions of user-defined model outputs have no known meaning.
    if about.labels_are_classes:
        values, counts = np.unique(labels, return_counts=True)
        right, guessed = labels == predictions, labels == values[counts.argmax()]
        # Let d be the number of samples on which exactly one of the models and the guess is right.
        # The standard error of the difference between the two fractions is at most sqrt(d) / n.
        error = np.sqrt((right != guessed).sum()) / len(labels)
        fit = _of_parts(right.mean(), guessed.mean(), error, "labels", _FEW_RIGHT)
        mistaken = _mistaken_classes(columns)
        return replace(fit, measure=fit.measure + mistaken, is_doubtful=True) if mistaken else fit
    if about.counts_parts:
        rows = np.random.default_rng(0).permutation(len(labels))[:_MOST_READ]
        counts = _counted_parts(train.take(columns["id"].iloc[rows].tolist()), about.load())
        guess = counts.max() / counts.sum()
        error = np.sqrt(guess * (1 - guess) / counts.sum())
        return _of_parts(predictions.sum() / labels.sum(), guess, error, about.label)
    return _of_numbers(labels.astype(float), predictions.astype(float)) if about.label else None


def _of_parts(value: float, guess: float, error: float, parts: str, least: float = 0) -> Fit:
    """Return the fit. ``error`` is the standard error of the difference ``value - guess``."""
    measure = (
        f"The models predict {100 * value:.3g} % of the {parts} of their training samples "
        f"correctly. Always guessing the most frequent one would be right for {100 * guess:.3g} %."
    )
    is_better = value > guess and value - guess >= 2 * error
    is_doubtful = value < 1 and (value < least or not is_better)
    return Fit(measure, float(value), float(guess), bool(is_doubtful))


def _mistaken_classes(columns: pd.DataFrame) -> str:
    """Return a sentence if most samples of class a are predicted as b, but most of b are not.

    That happens if classes are in the wrong order, but not if b is only predicted too often.
    """
    sizes = columns["label"].value_counts().to_dict()
    pairs = columns.value_counts(["label", "prediction"]).to_dict()
    most = [(a, b) for (a, b), n in sorted(pairs.items()) if 2 * n > sizes[a] >= _FEWEST]
    taken_for = {a: b for a, b in most if a != b}
    for a, b in taken_for.items():
        if b in taken_for:
            return (
                f" Most samples of class {a} are predicted as class {b}, and most of class {b} as "
                f"class {taken_for[b]}."
            )
    return ""


def _of_numbers(labels: np.ndarray, predictions: np.ndarray) -> Fit:
    if (labels == labels[0]).all():
        measure = f"All training samples have the label {labels[0]:.3g}, so the fit is unknown."
        return Fit(measure, None, 0.0, is_doubtful=False)
    squares = np.square(labels - predictions), np.square(labels - labels.mean())
    value = float(1 - squares[0].sum() / squares[1].sum())
    measure = (
        f"The models predict the labels of their training samples with an R2 of {value:.3g}. "
        "Always guessing the mean label would have an R2 of 0."
    )
    return Fit(measure, value, 0.0, is_doubtful=value <= 0)


def _counted_parts(split: Split, output: ModelOutput) -> np.ndarray:
    """Return how often each of 0, 1, 2, ... occurs among the scored parts of labels."""
    counts = np.zeros(0, dtype=np.int64)
    for i in range(len(split.ids)):
        labels = as_batch(split.batch(i, i + 1), output).labels[0]
        labels = labels[1:] if output.predicts_next else labels
        sample = labels[labels != IGNORED].long().bincount(minlength=len(counts)).numpy()
        sample[: len(counts)] += counts
        counts = sample
    return counts

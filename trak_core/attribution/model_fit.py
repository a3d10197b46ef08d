"""Compare the models' predictions for their training samples with a constant guess."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from trak_core.gradients import as_batch
from trak_core.model_outputs.about_outputs import About
from trak_core.model_outputs.model_output import IGNORED, ModelOutput
from trak_core.study.dataset_split import Split

# The most frequent token, or other part of a label, is found among this many random samples.
_MOST_READ = 256
# If a smaller fraction of predicted classes is correct, the fit is doubtful, even if a guess is
# worse.
_MIN_CORRECT = 0.5
_MIN_SAMPLES = 5  # In smaller classes, most samples can be mistaken for another class by chance.


@dataclass(frozen=True, slots=True)
class Fit:
    """How well the models and a constant guess predict the training samples.

    Attributes:
        measure: Sentences in ASCII that state the fraction of predictions that are correct, and the
            fraction of labels that are equal to the most frequent label. For regression, they state
            the R2 of the predictions.
        is_doubtful: Whether the models predict no better than the guess, predict most classes
            wrong, or mistake one class for another in most samples. Except for regression, models
            count as better only if the difference is at least two standard errors.
    """

    measure: str
    is_doubtful: bool


def fit_of(columns: pd.DataFrame, about: About, train: Split) -> Fit | None:
    """Return the fit of the models to the labels of their training samples.

    The result is None if predictions cannot be compared with labels. ``columns`` is a table with
    the columns ``id``, ``label`` and ``prediction``. ``train`` is read only if a sample has several
    labels, such as one for each token.
    """
    labels, predictions = (columns[key].to_numpy() for key in ("label", "prediction"))
    if about.is_own:
        return None  # Predictions of user-defined model outputs have no known meaning.
    if about.labels_are_classes:
        values, counts = np.unique(labels, return_counts=True)
        right, guessed = labels == predictions, labels == values[counts.argmax()]
        # Let d be the number of samples for which either the models or the guess is right, but not
        # both. The standard error of the difference between their fractions is at most sqrt(d) / n.
        error = np.sqrt((right != guessed).sum()) / len(labels)
        fit = _fit_of_fractions(right.mean(), guessed.mean(), error, "labels", _MIN_CORRECT)
        mistaken = _mistaken_classes(columns)
        return replace(fit, measure=fit.measure + mistaken, is_doubtful=True) if mistaken else fit
    if about.counts_parts:
        rows = np.random.default_rng(0).permutation(len(labels))[:_MOST_READ]
        counts = _count_label_values(train.take(columns["id"].iloc[rows].tolist()), about.load())
        guess = counts.max() / counts.sum()
        error = np.sqrt(guess * (1 - guess) / counts.sum())
        return _fit_of_fractions(predictions.sum() / labels.sum(), guess, error, about.label)
    return _fit_of_numbers(labels.astype(float), predictions.astype(float)) if about.label else None


def _fit_of_fractions(value: float, guess: float, error: float, noun: str, least: float = 0) -> Fit:
    """Return the fit of models that predict the fraction ``value`` of labels correctly.

    A constant guess is correct for the fraction ``guess``. ``error`` is the standard error of
    ``value - guess``. The fit is doubtful if ``value`` is below ``least``. ``noun`` is the name of
    the predicted values in the measure, such as labels.
    """
    measure = (
        f"The models predict {100 * value:.3g} % of the {noun} of their training samples "
        f"correctly. A guess of the most frequent value would be right for {100 * guess:.3g} %."
    )
    is_better = value > guess and value - guess >= 2 * error
    is_doubtful = value < 1 and (value < least or not is_better)
    return Fit(measure, bool(is_doubtful))


def _mistaken_classes(columns: pd.DataFrame) -> str:
    """Return a sentence if classes seem to be numbered differently than in training, or "".

    This is assumed if most samples of a class a are predicted as b, and most samples of b as
    another class. (If the models just predicted b too often, most samples of b would be predicted
    as b.)
    """
    sizes = columns["label"].value_counts().to_dict()
    pairs = columns.value_counts(["label", "prediction"]).to_dict()
    most = [(a, b) for (a, b), n in sorted(pairs.items()) if 2 * n > sizes[a] >= _MIN_SAMPLES]
    taken_for = {a: b for a, b in most if a != b}
    for a, b in taken_for.items():
        if b in taken_for:
            return (
                f" Most samples of class {a} are predicted as class {b}, and most of class {b} as "
                f"class {taken_for[b]}."
            )
    return ""


def _fit_of_numbers(labels: np.ndarray, predictions: np.ndarray) -> Fit:
    if (labels == labels[0]).all():
        measure = f"All training samples have the label {labels[0]:.3g}, so the fit is unknown."
        return Fit(measure, is_doubtful=False)
    squares = np.square(labels - predictions), np.square(labels - labels.mean())
    value = float(1 - squares[0].sum() / squares[1].sum())
    measure = (
        f"The models predict the labels of their training samples with an R2 of {value:.3g}. "
        "Always guessing the mean label would have an R2 of 0."
    )
    return Fit(measure, is_doubtful=value <= 0)


def _count_label_values(split: Split, output: ModelOutput) -> np.ndarray:
    """Return how often each value 0, 1, 2, ... occurs in labels, without ``IGNORED`` entries."""
    counts = np.zeros(0, dtype=np.int64)
    for i in range(len(split.ids)):
        labels = as_batch(split.batch(i, i + 1), output).labels[0]
        labels = labels[1:] if output.predicts_next else labels
        sample = labels[labels != IGNORED].long().bincount(minlength=len(counts)).numpy()
        sample[: len(counts)] += counts
        counts = sample
    return counts

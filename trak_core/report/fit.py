"""How well models predict the samples that they were trained on, compared with a constant guess."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from trak_core.gradients import as_batch
from trak_core.model_outputs.about_outputs import About
from trak_core.model_outputs.model_output import IGNORED, ModelOutput
from trak_core.study.dataset_split import Split

# Samples whose parts are counted for the most frequent one, drawn at random where there are more.
_MOST_READ = 256
# Fewer right classes are few, whatever the most frequent one is.
_FEW_RIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Fit:
    """How well models predict their own training samples, and how well a constant guess does.

    Attributes:
        measure: Both numbers in a sentence, ASCII.
        value: The part of the labels that are predicted right, or R2; None where all labels of a
            regression are the same.
        guess: The part that has the most frequent label; 0, the R2 of the mean label.
        is_doubtful: Whether the models are not better than the guess (for classes and parts: by two
            standard errors, because chance alone may be right), or get most classes wrong.
    """

    measure: str
    value: float | None
    guess: float
    is_doubtful: bool


def fit_of(columns: pd.DataFrame, about: About, train: Split) -> Fit | None:
    """Return how well models predict training samples; None where predictions are no labels.

    ``columns`` are ``id``, ``label`` and ``prediction`` as a scores file's table ``train`` has
    them. Where a label has many parts, those of up to 256 samples of ``train`` are read for the
    guess.
    """
    labels, predictions = (columns[key].to_numpy() for key in ("label", "prediction"))
    if about.is_own:
        return None  # such a prediction may be anything
    if about.labels_are_classes:
        values, counts = np.unique(labels, return_counts=True)
        right, guessed = labels == predictions, labels == values[counts.argmax()]
        # Only samples on which the two differ tell them apart.
        error = np.sqrt((right != guessed).sum()) / len(labels)
        return _of_parts(right.mean(), guessed.mean(), error, "labels", _FEW_RIGHT)
    if about.counts_parts:
        rows = np.random.default_rng(0).permutation(len(labels))[:_MOST_READ]
        counts = _counted_parts(train.take(columns["id"].iloc[rows].tolist()), about.load())
        guess = counts.max() / counts.sum()
        error = np.sqrt(guess * (1 - guess) / counts.sum())
        return _of_parts(predictions.sum() / labels.sum(), guess, error, about.label)
    return _of_numbers(labels.astype(float), predictions.astype(float)) if about.label else None


def _of_parts(value: float, guess: float, error: float, parts: str, least: float = 0) -> Fit:
    """Return it from the shares that are right, and the standard error of their difference."""
    measure = (
        f"The models predict {100 * value:.3g} % of the {parts} of their training samples; the "
        f"most frequent one alone is right for {100 * guess:.3g} %."
    )
    is_better = value > guess and value - guess >= 2 * error
    is_doubtful = value < 1 and (value < least or not is_better)
    return Fit(measure, float(value), float(guess), bool(is_doubtful))


def _of_numbers(labels: np.ndarray, predictions: np.ndarray) -> Fit:
    if (labels == labels[0]).all():
        measure = (
            f"All training samples have the label {labels[0]:.3g}: how well the models predict "
            "labels is unknown."
        )
        return Fit(measure, None, 0.0, is_doubtful=False)
    value = float(
        1 - np.square(labels - predictions).sum() / np.square(labels - labels.mean()).sum()
    )
    measure = (
        f"The models predict the labels of their training samples with an R2 of {value:.3g}; "
        "the mean label alone has 0."
    )
    return Fit(measure, value, 0.0, is_doubtful=value <= 0)


def _counted_parts(split: Split, output: ModelOutput) -> np.ndarray:
    """Return how often each value from 0 on is among the parts of labels that count."""
    counts = np.zeros(0, dtype=np.int64)
    for i in range(len(split.ids)):
        labels = as_batch(split.batch(i, i + 1), output).labels[0]
        labels = labels[1:] if output.predicts_next else labels
        own = labels[labels != IGNORED].long().bincount(minlength=len(counts)).numpy()
        own[: len(counts)] += counts
        counts = own
    return counts

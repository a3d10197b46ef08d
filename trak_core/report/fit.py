"""How well models predict the samples that they were trained on, compared with a constant guess."""

from collections import Counter
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
        is_doubtful: Whether the models are not clearly better than the guess (the sum of what they
            gain on each sample must be above 0 by two standard errors), or get most classes wrong.
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
    is_own_class = bool(about.is_own and about.label) and predictions.dtype.kind in "iu"
    if about.is_own and not is_own_class:
        return None  # such a prediction may be anything
    if about.labels_are_classes or is_own_class:
        right = (labels == predictions).astype(float)
        values, counts = np.unique(labels, return_counts=True)
        is_guessed = labels == values[counts.argmax()]
        return _of_parts(right - is_guessed, right.mean(), is_guessed.mean(), "labels", _FEW_RIGHT)
    if about.counts_parts:
        rows = np.random.default_rng(0).permutation(len(labels))[:_MOST_READ]
        counted = _counted_parts(train.take(columns["id"].iloc[rows].tolist()), about.load())
        (commonest, count), *_ = sum(counted, Counter[int]()).most_common(1)
        guessed = np.array([parts[commonest] for parts in counted])
        value, n_counted = predictions.sum() / labels.sum(), sum(parts.total() for parts in counted)
        return _of_parts(predictions[rows] - guessed, value, count / n_counted, about.label)
    return _of_numbers(labels.astype(float), predictions.astype(float)) if about.label else None


def _of_parts(gains: np.ndarray, value: float, guess: float, parts: str, least: float = 0) -> Fit:
    measure = (
        f"The models predict {100 * value:.3g} % of the {parts} of their training samples; the "
        f"most frequent one alone is right for {100 * guess:.3g} %."
    )
    is_doubtful = value < least or (value < 1 and not _is_clear(gains))
    return Fit(measure, float(value), float(guess), bool(is_doubtful))


def _of_numbers(labels: np.ndarray, predictions: np.ndarray) -> Fit:
    if (labels == labels[0]).all():
        measure = (
            f"All training samples have the label {labels[0]:.3g}: how well the models predict "
            "labels is unknown."
        )
        return Fit(measure, None, 0.0, is_doubtful=False)
    errors, spread = (labels - predictions) ** 2, (labels - labels.mean()) ** 2
    value = float(1 - errors.sum() / spread.sum())
    measure = (
        f"The models predict the labels of their training samples with an R2 of {value:.3g}; "
        "the mean label alone has 0."
    )
    return Fit(measure, value, 0.0, is_doubtful=value < 1 and not _is_clear(spread - errors))


def _is_clear(gains: np.ndarray) -> bool:
    """Return whether gains over the guess have a sum above 0 that chance hardly explains."""
    total = gains.sum()
    return bool(total > 0 and total >= 2 * np.sqrt(np.square(gains).sum()))


def _counted_parts(split: Split, output: ModelOutput) -> list[Counter[int]]:
    """Return how often each value is among the parts of a sample's label that count."""
    counted = []
    for i in range(len(split.ids)):
        labels = as_batch(split.batch(i, i + 1), output).labels[0]
        labels = labels[1:] if output.predicts_next else labels
        counts = labels[labels != IGNORED].long().bincount()
        counted.append(Counter({i: counts[i].item() for i in counts.nonzero().flatten().tolist()}))
    return counted

"""Numbers and labels as readers see them: the filters that templates format with."""

from typing import Any
from urllib.parse import quote

from trak_core.model_outputs.about_outputs import About
from trak_core.spec import MEAN_OF


def number(value: float, digits: int = 3) -> str:
    """Return a number in so many digits, with a true minus sign; no exponent for everyday sizes."""
    text = f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    if "e" in text and 1 <= abs(value) < 1e6:
        text = f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    """Return a number with its sign, plus as well: for scores."""
    return f"{'+' if value > 0 else ''}{number(value, 2)}"


def fixed(value: float, decimals: int) -> str:
    """Return a number with so many decimals, with a true minus sign: for correlations."""
    # By z a number that rounds to zero has no sign.
    return f"{value:z.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def percent(part: float, decimals: int = 0) -> str:
    """Return a part of 1 as a percentage, with a true minus sign."""
    return f"{fixed(100 * part, decimals)}\N{NO-BREAK SPACE}%"


def thousands(count: float) -> str:
    """Return a whole number with commas: 2,000."""
    return f"{count:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 target, 2,000 targets."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def label(value: Any) -> str:
    """Return a sample's label or prediction: a number in three digits, a class as it is."""
    return number(value) if isinstance(value, float) else str(value)


def anchor(sample_id: Any) -> str:
    """Return an id as a part of an address, different ones for different ids."""
    # A browser takes the part after # as it is, so that no id needs to be decoded.
    return quote(str(sample_id), safe="")


def is_right(target: Any, output: About) -> bool | None:
    """Return whether the models predict a target's label; None where no prediction is a label."""
    if hasattr(target, MEAN_OF) or not (output.labels_are_classes or output.needs_pairs):
        return None
    return bool(target.label == target.prediction)


def of_target(target: Any, output: About) -> str:
    """Return what stands in a row of ``targets``: ``label 3, predicted 5``; or what it means."""
    if hasattr(target, MEAN_OF):
        return f"the mean of {target.mean_of}"
    parts = ((output.label, target.label), (output.prediction, target.prediction))
    return ", ".join(f"{word} {label(value)}" for word, value in parts if word)


def of_training_sample(influence: Any, output: About) -> str:
    """Return the label in a row of ``top_influences``; empty where it says nothing."""
    return f"{output.label} {label(influence.train_label)}" if output.label else ""

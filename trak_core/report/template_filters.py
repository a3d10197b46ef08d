"""Filters that format numbers and labels in templates."""

from typing import Any
from urllib.parse import quote

from trak_core.model_outputs.about_outputs import About


def number(value: float, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits. Numbers from 1 to 1e6 get no exponent."""
    text = f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    if "e" in text and 1 <= abs(value) < 1e6:
        text = f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    """Return a score with two significant digits and its sign, plus or minus."""
    return f"{'+' if value > 0 else ''}{number(value, 2)}"


def fixed(value: float, decimals: int) -> str:
    """Return a number with ``decimals`` digits after the decimal point."""
    # With the option z, a negative number that rounds to 0 is written as 0 and not as -0.
    return f"{value:z.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def percent(part: float, decimals: int = 0) -> str:
    """Return a fraction as a percentage: 0.25 as 25 %."""
    return f"{fixed(100 * part, decimals)}\N{NO-BREAK SPACE}%"


def thousands(count: float) -> str:
    """Return an integer with commas between thousands, such as 2,000."""
    return f"{count:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return a count with a singular or plural noun, such as "1 target" or "2,000 targets"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def label(value: Any) -> str:
    """Return a label or prediction as text. Floats get three significant digits."""
    return number(value) if isinstance(value, float) else str(value)


def anchor(sample_id: Any) -> str:
    """Return the id of a sample as a URL fragment. Different ids have different fragments."""
    # Browsers compare a fragment with the ids of elements before they decode it.
    return quote(str(sample_id), safe="")


def is_right(target: Any, output: About) -> bool | None:
    """Return whether a target is predicted correctly, or None if this is not defined."""
    if not (output.labels_are_classes or output.needs_pairs):
        return None
    return bool(target.label == target.prediction)


def of_target(target: Any, output: About) -> str:
    """Return the label and prediction of a target as text, such as "label 3, predicted 5"."""
    parts = ((output.label, target.label), (output.prediction, target.prediction))
    return ", ".join(f"{word} {label(value)}" for word, value in parts if word)


def of_training_sample(influence: Any, output: About) -> str:
    """Return the label of a training sample as text, such as "label 3", or "" without labels."""
    return f"{output.label} {label(influence.train_label)}" if output.label else ""

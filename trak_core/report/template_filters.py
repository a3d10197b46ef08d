"""The filters with which templates format numbers and labels."""

from typing import Any
from urllib.parse import quote

from trak_core.model_outputs.about_outputs import About
from trak_core.settings import MEAN_OF


def number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits, without an exponent below 1e6."""
    text = f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:.{digits}g}"
    if "e" in text and 1 <= abs(value) < 1e6:
        text = f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    """Return a score with its sign, plus or minus."""
    return f"{'+' if value > 0 else ''}{number(value, 2)}"


def fixed(value: float, decimals: int) -> str:
    """Return a number, such as a correlation, with ``decimals`` decimals."""
    # The option z removes the sign of a number that rounds to 0.
    return f"{value:z.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def percent(part: float, decimals: int = 0) -> str:
    """Return a fraction as a percentage."""
    return f"{fixed(100 * part, decimals)}\N{NO-BREAK SPACE}%"


def thousands(count: float) -> str:
    """Return an integer with commas: 2,000."""
    return f"{count:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 target, 2,000 targets."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def label(value: Any) -> str:
    """Return a label or prediction as text. Floats get three significant digits."""
    return number(value) if isinstance(value, float) else str(value)


def anchor(sample_id: Any) -> str:
    """Return an id as a URL fragment, which differs between different ids."""
    # Browsers compare fragments without decoding them.
    return quote(str(sample_id), safe="")


def is_right(target: Any, output: About) -> bool | None:
    """Return whether a target's prediction is its label, or None if predictions are not labels."""
    if hasattr(target, MEAN_OF) or not (output.labels_are_classes or output.needs_pairs):
        return None
    return bool(target.label == target.prediction)


def of_target(target: Any, output: About) -> str:
    """Return a description of a row of the table ``targets``, such as ``label 3, predicted 5``."""
    if hasattr(target, MEAN_OF):
        return f"the mean of {target.mean_of}"
    parts = ((output.label, target.label), (output.prediction, target.prediction))
    return ", ".join(f"{word} {label(value)}" for word, value in parts if word)


def of_training_sample(influence: Any, output: About) -> str:
    """Return the label in a row of ``top_influences``, or "" if the model output has no labels."""
    return f"{output.label} {label(influence.train_label)}" if output.label else ""

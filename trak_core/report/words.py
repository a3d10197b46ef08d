"""What tables say of a sample, in the words of its model output: ``label 3, predicted 5``."""

from trak_core.model_outputs.table import About
from trak_core.report.facts import Row
from trak_core.report.numbers import label


def of_target(target: Row, output: About) -> str:
    """Return a target's label, and what the models make of it."""
    said = ((output.label, target["label"]), (output.prediction, target["prediction"]))
    return ", ".join(f"{word} {label(value)}" for word, value in said if word)


def of_training_sample(influence: Row, output: About) -> str:
    """Return a training sample's label; empty where it says nothing."""
    return f"{output.label} {label(influence['train_label'])}" if output.label else ""

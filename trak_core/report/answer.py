"""One experiment's answer: a page to read, with longer texts than the report has room for."""

from pathlib import Path

from trak_core.model_outputs.table import TABLE
from trak_core.report.examples import Examples
from trak_core.report.markup import environment, filled_in, style


def answer(examples: Examples, study_file: Path, each: int) -> str:
    """Return an experiment's targets and strongest training samples as one HTML document.

    Args:
        examples: Of the experiment.
        study_file: The study's Python file, which is named.
        each: Training samples of either sign that are shown of a target, at most.
    """
    return filled_in(
        environment(),
        "answer",
        shown=examples,
        output=TABLE[examples.experiment.source.spec["model_output"]],
        study=study_file.name,
        each=each,
        style=style(),
    )

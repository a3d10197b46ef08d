"""A pair of scores to read as an example, from this very study."""

from dataclasses import dataclass

from trak_core.report.facts import Experiment, Row


@dataclass(frozen=True, slots=True)
class WorkedExample:
    """A target with the training samples that moved it most either way.

    Attributes:
        target: A row of the experiment's targets.
        helpful: The row of its largest score.
        harmful: The row of its lowest.
        ratio: Of the two scores' sizes, the helpful one's above.
    """

    target: Row
    helpful: Row
    harmful: Row
    ratio: float


def worked_example(experiment: Experiment) -> WorkedExample | None:
    """Return the first target that has scores of either sign; None if there is none."""
    for target in experiment.targets:
        helpful = experiment.strongest.get((target["id"], 1))
        harmful = experiment.strongest.get((target["id"], -1))
        if helpful and harmful:
            ratio = abs(helpful[0]["score"] / harmful[0]["score"])
            return WorkedExample(target, helpful[0], harmful[0], ratio)
    return None

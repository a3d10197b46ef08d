"""Each experiment's targets beside the training samples that moved them most.

The page (templates/examples.html.j2) and the figures (``figure``) show the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trak_core.report.facts import Experiment, Row
from trak_core.report.samples import Picture, drawn, printed
from trak_core.study.study import TRAIN, Study, users_code

# Training samples of either sign beside a target; targets of an experiment, and targets in all,
# which bounds the page's size.
EACH = 4
_TARGETS, _IN_ALL = 20, 120


@dataclass(frozen=True, slots=True)
class Examples:
    """Some targets of an experiment, and their strongest training samples.

    Attributes:
        experiment: Its scores.
        targets: Of each target that is shown, its picture, or what it holds as text.
        train: Likewise, of their strongest training samples.
        drawn: Whether these are pictures: the study says how to draw a sample.
    """

    experiment: Experiment
    targets: Mapping[Any, Picture | str]
    train: Mapping[Any, Picture | str]
    drawn: bool

    @property
    def shown(self) -> Sequence[Row]:
        """Rows of the targets that are shown."""
        return self.experiment.targets[: len(self.targets)]

    def strongest(self, target: Any, sign: int) -> Sequence[Row]:
        """Return rows of a target's strongest training samples: helpful at 1, harmful at -1."""
        return self.experiment.strongest.get((target, sign), ())


def targets_shown(n_experiments: int) -> list[int]:
    """Return how many targets of each experiment are shown at most: none of very late ones."""
    each = max(1, min(_TARGETS, _IN_ALL // n_experiments))
    return [each if i * each < _IN_ALL else 0 for i in range(n_experiments)]


def find_examples(
    study: Study, experiments: Sequence[Experiment], n_shown: Sequence[int]
) -> list[Examples]:
    """Draw targets and their strongest training samples, each once, or print them.

    Args:
        study: Its ``draw(axes, sample)`` draws one; without it samples are printed.
        experiments: Their scores, with the strongest samples of at least the targets shown.
        n_shown: How many targets of each are shown, from the first.

    Returns:
        One an experiment.

    Raises:
        InputError: If the study's draw fails.
    """
    draw = study.function("draw") if study.has("draw") else None

    def show(sample: Any) -> Picture | str:
        if draw is None:
            return printed(sample)
        with users_code(f"{study.path}: drawing a sample"):
            return drawn(draw, sample)

    train_split = study.split(TRAIN, None)
    row_of = {sample_id: row for row, sample_id in enumerate(train_split.ids)}
    train: dict[Any, Picture | str] = {}
    found = []
    for experiment, n in zip(experiments, n_shown, strict=True):
        ids = [about["id"] for about in experiment.targets[:n]]
        split = study.split(experiment.name, ids)
        targets = {i: show(split.samples[row]) for row, i in enumerate(ids)}
        for i in (row["train_id"] for rows in experiment.strongest.values() for row in rows):
            if i not in train:
                train[i] = show(train_split.samples[row_of[i]])
        found.append(Examples(experiment, targets, train, draw is not None))
    return found

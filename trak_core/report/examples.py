"""Each experiment's targets beside the training samples that moved them most.

The page (templates/examples.html.j2), the answers (templates/answer.html.j2) and the figures
(``figure``) show the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trak_core.report.facts import Experiment, Row
from trak_core.report.samples import Picture, drawn, printed
from trak_core.report.texts import readable
from trak_core.study.split import Split, users_code
from trak_core.study.study import TRAIN, Study
from trak_core.study.targets import split_of

# Training samples of either sign beside a target; targets of an experiment, and targets in all,
# which bounds the page's size.
EACH = 4
_TARGETS, _IN_ALL = 20, 120
# Characters of a text beside others.
BEGINNING = 200

Show = Callable[[Any, Any], Picture | str]


@dataclass(frozen=True, slots=True)
class Examples:
    """Some targets of an experiment, and their strongest training samples.

    Attributes:
        experiment: Its scores.
        targets: Of each target that is shown, its picture, or what it holds as text.
        train: Likewise, of their strongest training samples.
        drawn: Whether these are pictures: the study says how to draw a sample.
        described: Whether these are, or have, texts: the study says what a sample is.
    """

    experiment: Experiment
    targets: Mapping[Any, Picture | str]
    train: Mapping[Any, Picture | str]
    drawn: bool
    described: bool

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


def shown_by(study: Study, characters: int) -> Show:
    """Return how a sample is shown: drawn, with its text if there is one; or its text; or printed.

    Args:
        study: Its ``draw(axes, sample)`` draws a sample, its ``describe(sample)`` is the text.
        characters: Of a text.

    Returns:
        A function of a sample's id and the sample.
    """
    draw = study.function("draw") if study.has("draw") else None
    describes = study.has("describe")

    def show(sample_id: Any, sample: Any) -> Picture | str:
        text = readable(study.describe(sample_id, sample), characters) if describes else ""
        if draw is None:
            return (text or "(an empty text)") if describes else printed(sample)
        with users_code(f"{study.path}: drawing a sample"):
            return replace(drawn(draw, sample), text=text)

    return show


@dataclass(frozen=True, slots=True)
class Shelf:
    """Samples by their ids, and what is shown of those that were asked for."""

    split: Split
    row_of: Mapping[Any, int]
    seen: dict[Any, Picture | str] = field(default_factory=dict)

    @classmethod
    def of(cls, split: Split) -> "Shelf":
        """Return the samples of a split."""
        return cls(split, {sample_id: row for row, sample_id in enumerate(split.ids)})

    def sample(self, sample_id: Any) -> Any:
        """Return one sample."""
        return self.split.samples[self.row_of[sample_id]]

    def show(self, sample_id: Any, show: Show) -> Picture | str:
        """Return what one sample is shown as, which is found out once."""
        if sample_id not in self.seen:
            self.seen[sample_id] = show(sample_id, self.sample(sample_id))
        return self.seen[sample_id]


def examples_of(
    study: Study, experiment: Experiment, n_shown: int, targets: Shelf, train: Shelf, show: Show
) -> Examples:
    """Return an experiment's first targets and their strongest training samples, as shown."""
    ids = [about["id"] for about in experiment.targets[:n_shown]]
    strongest = [row["train_id"] for rows in experiment.strongest.values() for row in rows]
    return Examples(
        experiment,
        {i: targets.show(i, show) for i in ids},
        {i: train.show(i, show) for i in strongest},
        drawn=study.has("draw"),
        described=study.has("describe"),
    )


def find_examples(
    study: Study,
    experiments: Sequence[Experiment],
    n_shown: Sequence[int],
    questions: Mapping[str, Path] | None = None,
) -> list[Examples]:
    """Show targets and their strongest training samples, each once.

    Args:
        study: Its ``draw(axes, sample)`` draws one, its ``describe(sample)`` says what it is;
            without either samples are printed.
        experiments: Their scores, with the strongest samples of at least the targets shown.
        n_shown: How many targets of each are shown, from the first.
        questions: Files of experiments that bring their own targets.

    Returns:
        One an experiment.

    Raises:
        InputError: If the study's draw or describe fails.
    """
    show = shown_by(study, BEGINNING)
    train = Shelf.of(study.split(TRAIN, None))
    found = []
    for experiment, n in zip(experiments, n_shown, strict=True):
        ids = [about["id"] for about in experiment.targets[:n]]
        targets = Shelf.of(
            split_of(study, experiment.name, ids, (questions or {}).get(experiment.name))
        )
        found.append(examples_of(study, experiment, n, targets, train, show))
    return found

"""Choose the samples that the report shows, and convert them to pictures or texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from trak_core.report.read_results import File, rows_with
from trak_core.study.dataset_split import Split
from trak_core.study.show_samples import SHORTENED, Picture, are_drawn, show_sample
from trak_core.study.study import Study

# For each target, at most this many training samples with a positive score are shown, and as many
# with a negative score.
EACH = 4
# The largest number of targets per experiment and in total, which limits the size of the page.
_TARGETS, _IN_ALL = 20, 120


@dataclass(frozen=True, slots=True)
class Examples:
    """The first targets of an experiment and their strongest training samples.

    ``targets`` and ``train`` map the ids of samples to pictures or texts. ``train`` contains the
    training samples of all experiments. ``drawn`` is true if samples are shown as pictures, and
    ``described`` is true if the study's ``describe`` returns their texts.
    """

    experiment: File
    targets: Mapping[Any, Picture | str]
    train: Mapping[Any, Picture | str]
    drawn: bool
    described: bool

    @property
    def shown(self) -> list[Any]:
        """The rows of the shown targets in the experiment's table of targets."""
        return rows_with(self.experiment.tables["shown"])


def targets_shown(n_experiments: int) -> list[int]:
    """Return the largest number of targets to show for each experiment, at most 120 in all."""
    each = max(1, min(_TARGETS, _IN_ALL // n_experiments))
    return [each if i * each < _IN_ALL else 0 for i in range(n_experiments)]


def find_examples(
    study: Study,
    experiments: Sequence[File],
    train: Split,
    targets: Iterable[Split],
    also: Sequence[Any] = (),
) -> list[Examples]:
    """Return the first targets and their strongest training samples for each experiment.

    The study's ``draw(axes, sample)`` and ``describe(sample)`` determine the samples' pictures and
    texts. Without them, images are shown as pictures, and other samples are printed. ``targets``
    contains the targets to show for each experiment, and ``also`` the ids of further training
    samples to show.
    """
    draws, describes = are_drawn(study, train), study.has("describe")

    def show(split: Split) -> dict[Any, Picture | str]:
        return {
            i: show_sample(study, i, split.samples[row], SHORTENED, draws)
            for row, i in enumerate(split.ids)
        }

    strong = pd.concat([file.tables["top_influences"]["train_id"] for file in experiments])
    ids = list(dict.fromkeys([*strong.tolist(), *also]))
    shown_train = show(train.take(ids))
    return [
        Examples(file, show(split), shown_train, draws, describes)
        for file, split in zip(experiments, targets, strict=True)
    ]

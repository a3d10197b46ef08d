"""Draw some targets of an experiment beside the training samples that help and harm them most."""

from pathlib import Path

import matplotlib as mpl

from trak_core.report.examples import EACH, find_examples
from trak_core.report.figure import influences_figure
from trak_core.report.read import read_experiment
from trak_core.study.study import Study
from trak_core.system.whole_file import written_whole

_TARGETS = 6


def draw_influences(*, figure: Path, scores: Path, study_file: Path) -> None:
    """Write a picture: one row a target, the most helpful and most harmful samples beside it.

    Args:
        figure: The PNG file to write.
        scores: The experiment's scores.
        study_file: The study's Python file; its ``draw(axes, sample)`` draws one sample.

    Raises:
        InputError: If a file is not what it must be, or the study's draw fails.
    """
    experiment = read_experiment(scores, scores.parents[1], _TARGETS, EACH)
    (examples,) = find_examples(Study.load(study_file), [experiment], [_TARGETS])
    # The software version in a PNG's metadata is all that would differ between machines.
    with mpl.rc_context({"savefig.dpi": 110}), written_whole(figure) as partial:
        influences_figure(examples).savefig(partial, format="png", metadata={"Software": None})

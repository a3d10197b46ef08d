"""Show targets of an experiment beside the training samples that help and harm them most.

As a picture, as a page to read, and as a table of texts.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from trak_core.artifacts import ANSWERS, create
from trak_core.report.answer import answer as answer_page
from trak_core.report.examples import (
    BEGINNING,
    EACH,
    Examples,
    Shelf,
    examples_of,
    shown_by,
    targets_shown,
)
from trak_core.report.figure import influences_figure
from trak_core.report.read import read_experiment
from trak_core.report.samples import printed
from trak_core.report.texts import on_one_line, readable
from trak_core.study.questions import split_of
from trak_core.study.study import TRAIN, Study
from trak_core.system.files import written_whole
from trak_core.system.progress import blocks_with_progress, software

# On the page: characters of a text, and training samples of either sign where they take lines, not
# pictures.
_CHARACTERS, _EACH_TEXT = 1000, 10


def _draw(figure: Path, examples: Examples) -> None:
    # The software version in a PNG's metadata is all that would differ between machines.
    with (
        mpl.rc_context({"savefig.dpi": 110}),
        warnings.catch_warnings(),
        written_whole(figure) as partial,
    ):
        # A script that the font lacks is drawn as boxes; the pages have it.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        influences_figure(examples).savefig(partial, format="png", metadata={"Software": None})


def _texts(study: Study, shelf: Shelf, ids: Sequence[Any], what: str) -> pd.DataFrame:
    """Return the beginnings of samples' texts, each on one line."""
    found = []
    for start, stop in blocks_with_progress(len(ids), 1, f"texts of {what}"):
        for sample_id in ids[start:stop]:
            sample = shelf.sample(sample_id)
            text = study.describe(sample_id, sample) if study.has("describe") else printed(sample)
            found.append(on_one_line(readable(text, BEGINNING)))
    return pd.DataFrame({"id": list(ids), "text": found})


def _write_texts(
    texts: Path, study: Study, examples: Examples, targets: Shelf, train: Shelf, code: str
) -> None:
    experiment = examples.experiment
    if study.has("describe"):
        ids = [about["id"] for about in experiment.targets], experiment.influential
    else:  # no reason to read more samples than are shown
        ids = list(examples.targets), list(examples.train)
    spec = {"scores": experiment.source.content_hash}
    made_by = software(code, "cpu", "pandas", made_from=[dict(experiment.source.provenance)])
    with create(texts, ANSWERS, spec, made_by, characters=BEGINNING) as writer:
        writer.table("targets", _texts(study, targets, ids[0], "targets"), ["id"])
        writer.table("train", _texts(study, train, ids[1], "training samples"), ["id"])


def draw_influences(
    *,
    figure: Path,
    answer: Path,
    texts: Path,
    scores: Path,
    study_file: Path,
    question: Path | None = None,
    code: str,
) -> None:
    """Write a picture of some targets, a page of more, and the texts of all as a table.

    Args:
        figure: The PNG file to write: one row a target, the most helpful and most harmful samples
            beside it.
        answer: The HTML file to write, with longer texts.
        texts: The file to write with the beginnings of texts by id, for targets and for all
            training samples in ``top_influences``; for a study without ``describe(sample)``, what
            the page prints of the samples there.
        scores: The experiment's scores.
        study_file: The study's Python file; its ``draw(axes, sample)`` draws one sample, its
            ``describe(sample)`` says what it is.
        question: The file of an experiment that brings its own targets.
        code: The stage's code digest.

    Raises:
        InputError: If a file is not what it must be, or the study's draw or describe fails.
    """
    study = Study.load(study_file)
    (n_shown,) = targets_shown(1)
    each = EACH if study.has("draw") else _EACH_TEXT
    experiment = read_experiment(scores, scores.parents[1], n_shown, each)
    train = Shelf.of(study.split(TRAIN, None))
    targets = Shelf.of(
        split_of(study, experiment.name, [one["id"] for one in experiment.targets], question)
    )
    show = shown_by(study, _CHARACTERS)
    examples = examples_of(study, experiment, n_shown, targets, train, show)
    _draw(figure, examples)
    with written_whole(answer) as partial:
        partial.write_text(answer_page(examples, study_file, each), encoding="utf-8")
    _write_texts(texts, study, examples, targets, train, code)

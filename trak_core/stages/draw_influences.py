"""Show an experiment's targets beside their strongest training samples: picture, page, texts."""

import warnings
from pathlib import Path

import matplotlib as mpl
import pandas as pd

from trak_core.artifacts import ANSWERS, create
from trak_core.report.charts import influences_figure
from trak_core.report.describe_samples import (
    BEGINNING,
    EACH,
    Examples,
    are_drawn,
    find_examples,
    printed,
    readable,
    targets_shown,
)
from trak_core.report.read import read_experiment
from trak_core.report.render import answer as answer_page
from trak_core.spec import TRAIN
from trak_core.study.split import Split
from trak_core.study.study import Study
from trak_core.study.targets import split_of
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


def _texts(study: Study, split: Split, name: str) -> pd.DataFrame:
    """Return the beginnings of samples' texts, each on one line."""
    texts = []
    for start, stop in blocks_with_progress(len(split.ids), 1, f"texts of {name}"):
        for row in range(start, stop):
            sample_id, sample = split.ids[row], split.samples[row]
            text = study.describe(sample_id, sample) if study.has("describe") else printed(sample)
            texts.append(" ".join(readable(text, BEGINNING).split()))
    return pd.DataFrame({"id": split.ids, "text": texts})


def _write_texts(
    texts: Path, study: Study, examples: Examples, targets: Split, train: Split, code: str
) -> None:
    scores = examples.experiment
    influential = scores.attributes["influential"]
    if not study.has("describe"):  # no reason to read more samples than are shown
        targets, influential = targets.take(list(examples.targets)), list(examples.train)
    spec = {"scores": scores.content_hash}
    made_by = software(code, "cpu", "pandas", made_from=[dict(scores.provenance)])
    with create(texts, ANSWERS, spec, made_by, characters=BEGINNING) as writer:
        writer.table("targets", _texts(study, targets, "targets"), ["id"])
        writer.table("train", _texts(study, train.take(influential), "training samples"), ["id"])


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

    The PNG ``figure`` has a row a target, its most helpful and most harmful samples beside it; the
    HTML ``answer`` has longer texts. ``texts`` holds the beginnings of texts by id, of targets and
    of all training samples in ``top_influences``; for a study without ``describe(sample)``, what
    the page prints of the samples there. The study's ``draw`` and ``describe`` show samples.
    """
    study = Study.load(study_file)
    (n_shown,) = targets_shown(1)
    train = study.split(TRAIN, None)
    each = EACH if are_drawn(study, train) else _EACH_TEXT
    experiment = read_experiment(scores, scores.parents[1], n_shown, each)
    ids = experiment.tables["targets"]["id"].tolist()
    targets = split_of(study, experiment.spec["experiment"], ids, question)
    (examples,) = find_examples(study, [experiment], train, [targets], _CHARACTERS)
    _draw(figure, examples)
    with written_whole(answer) as partial:
        partial.write_text(answer_page(examples, study_file.name, each), encoding="utf-8")
    _write_texts(texts, study, examples, targets, train, code)

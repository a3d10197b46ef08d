"""Write HTML pages: of targets with their most influential training samples, and of lists."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trak_core.artifacts import (
    ANSWERS,
    SELF_INFLUENCE,
    TOKEN_SCORES,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.lists.lists import ENOUGH_TARGETS
from trak_core.report.explore_data import EACH_ON_PAGE, PageContents, explore
from trak_core.report.read_results import output_of, read_experiment, with_class_names
from trak_core.report.render import experiment_page, rendered, score_warnings
from trak_core.report.template_filters import anchor, number
from trak_core.runtime.files import atomic_write, safe_cell
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import TRAIN
from trak_core.study.dataset_split import Split
from trak_core.study.read_targets import split_of
from trak_core.study.show_samples import SHORTENED, Picture, are_drawn, short_text, show_sample
from trak_core.study.study import Study

# The largest number of targets on a page. The size of the page in bytes is limited, too.
_MAX_TARGETS = 20_000

# The largest number of rows on the page of a list, and of characters of each text on it.
_N_ROWS, _CHARACTERS = 100, 600
# The page of a list can be filtered by label, unless there are more different labels than this.
_N_LABELS = 40
_NUMBERS = ("harm", "help", "score", "self_influence", "output", "closeness", "cosine")
# The page of a list rounds decimal numbers with more than _LONG characters to four digits.
_DECIMAL, _LONG = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?"), 8
_CLASSES = ("label", "suggested_label", "prediction", "other_label")
# Columns that the page of a list shows in another form, or that only the CSV contains.
_SHOWN_ELSEWHERE = ("id", "rank", "other_id", "among", "worth_a_look", "output_sd", "loss_weight")


def _texts(study: Study, split: Split, name: str) -> pd.DataFrame:
    rows = blocks_with_progress(len(split.ids), 1, f"texts of {name}")
    texts = [short_text(study, split.ids[row], split.samples[row]) for row, _ in rows]
    return pd.DataFrame({"id": split.ids, "text": texts})


def _write_texts(
    texts: Path, study: Study, page: PageContents, targets: Split, train: Split, code: str
) -> None:
    scores = page.experiment
    influential = scores.attributes["influential"]
    # Without describe(), the texts are the printed values of samples, which are less useful. To
    # save time, only the samples on the page are then read.
    if not study.has("describe"):
        shown = scores.tables["targets"]["id"].tolist()[: len(page.targets)]
        targets, influential = targets.take(shown), scores.tables["top_influences"]["train_id"]
        influential = influential.unique().tolist()
    spec = {"scores": scores.content_hash}
    made_by = software(code, "cpu", "pandas", made_from=[dict(scores.provenance)])
    with create(texts, ANSWERS, spec, made_by, characters=SHORTENED) as writer:
        writer.table("targets", _texts(study, targets, "targets"), ["id"])
        writer.table("train", _texts(study, train.take(influential), "training samples"), ["id"])


def draw_influences(
    *,
    answer: Path,
    texts: Path,
    scores: Path,
    self_influence: Sequence[Path] = (),
    token_scores: Sequence[Path] = (),
    study_file: Path,
    question: Path | None = None,
    code: str,
) -> None:
    """Write a page of an experiment's targets, and a file of texts.

    The HTML page ``answer`` shows the targets with their most influential training samples. The
    study's ``draw`` and ``describe`` determine how samples are shown. The file ``texts`` contains
    the shortened texts of the targets and of the training samples in the table ``top_influences``.
    Without ``describe``, the texts are the printed values of only the samples on the page.

    ``self_influence`` and ``token_scores`` contain at most one file each. If there is a file of
    token scores, the page colours tokens by their scores. If the study does not define
    ``token_texts``, the page shows token ids instead of the texts of tokens.
    """
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    experiment = read_experiment(scores, scores.parents[1], _MAX_TARGETS, EACH_ON_PAGE, train)
    experiment = with_class_names(experiment, study.class_names())
    ids = experiment.tables["targets"]["id"].tolist()
    targets = split_of(study, experiment.spec["experiment"], ids, question)
    influence = tokens = None
    for path in self_influence:
        with open_artifact(path, SELF_INFLUENCE) as file:
            table = file.table("train")
        influence = pd.Series(table["self_influence"].to_numpy(), index=table["id"].to_numpy())
        ids = experiment.tables["train"]["id"].tolist()
        check_same("training samples", ids, [i for i in ids if i in influence.index], file)
    for path in token_scores:
        with open_artifact(path, TOKEN_SCORES) as file:
            check_same("scores", experiment.content_hash, file.spec["scores"], file)
            tokens = file.table("tokens")
    samples = train, targets
    explored = explore(experiment, study, *samples, token_scores=tokens, self_influence=influence)
    with atomic_write(answer) as partial:
        partial.write_text(experiment_page(explored, study.name), encoding="utf-8")
    _write_texts(texts, study, explored, targets, train, code)


def show_list(
    *,
    page: Path,
    listed: Path,
    kind: str,
    experiment: str,
    pool: Path | None = None,
    question: Path | None = None,
    scores: Sequence[Path] = (),
    study_file: Path,
    code: str,
) -> None:
    """Write a page with pictures or texts of the samples in the first 100 rows of a list.

    The samples are read from the file ``pool`` if it is given, and else from the training data. A
    duplicate is shown together with the sample that it duplicates, which may be a target of
    ``experiment``. ``question`` is the file that contains these targets, or None if the study
    contains them. For a list of suspects, ``scores`` contains the file of scores. The study's
    ``draw`` and ``describe`` determine how samples are shown.
    """
    # Cells are read as strings, so that the page shows the numbers without conversion.
    rows = pd.read_csv(listed, dtype=str, keep_default_na=False, encoding="utf-8")
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    samples = train if pool is None else split_of(study, "pool", None, pool)
    draws = are_drawn(study, samples)
    classes = bool(study.class_names())

    def shown(split: Split, cells: Sequence[str]) -> dict[str, tuple[Any, Picture | str]]:
        row_of = {str(safe_cell(i)): row for row, i in enumerate(split.ids)}
        rows = {cell: (split.ids[row_of[cell]], split.samples[row_of[cell]]) for cell in cells}
        return {
            cell: (sample_id, show_sample(study, sample_id, sample, _CHARACTERS, draws))
            for cell, (sample_id, sample) in rows.items()
        }

    first = rows.head(_N_ROWS)
    own = shown(samples, first["id"].tolist())
    others: dict[str, dict[str, tuple[Any, Picture | str]]] = {}
    if "other_id" in first:
        for among, part in first.groupby("among"):
            split = train if among == TRAIN else split_of(study, str(among), None, question)
            others[str(among)] = shown(split, part["other_id"].tolist())
    entries = []
    for row in first.to_dict("records"):
        sample_id, sample = own[row["id"]]
        entry: dict[str, Any] = {
            "rank": row["rank"],
            "cell": row["id"],
            "key": f"{row['id']} {row.get('other_id', '')}",
            "label": row.get("label", ""),
            "facts": _facts(row, classes=classes),
            "samples": [("train" if pool is None else "pool", sample_id, sample)],
            "anchor": anchor(sample_id),
            "looks": row.get("worth_a_look") == "1",
        }
        if "other_id" in row:
            among = "train" if row["among"] == TRAIN else "target"
            entry["samples"].append((among, *others[row["among"]][row["other_id"]]))
        entries.append(entry)
    # Labels are sorted by length first, so that class 10 comes after class 9.
    labels = sorted({entry["label"] for entry in entries}, key=lambda text: (len(text), text))
    n_looks = rows["worth_a_look"].tolist().count("1") if "worth_a_look" in rows else 0
    files = [read_experiment(path, path.parents[1], 0, 0, train) for path in scores]
    tables = [file.tables["targets"] for file in files]
    markup = rendered(
        "list",
        kind=kind,
        experiment=experiment,
        entries=entries,
        labels=labels if 1 < len(labels) <= _N_LABELS else [],
        n_rows=len(rows),
        n_looks=n_looks,
        n_targets=sum(len(targets) for targets in tables if len(targets) < ENOUGH_TARGETS),
        output=output_of(files[0]) if files else None,
        warnings=[warning for file in files for warning in score_warnings(file)],
        suggests="suggested_label" in rows,
        has_pool=pool is not None,
        described=study.has("describe"),
        drawn=draws,
        study=study.name,
    )
    with atomic_write(page) as partial:
        partial.write_text(markup, encoding="utf-8")
    print(f"{len(entries)} of {len(rows)} rows are on the page.")


def _facts(row: Mapping[str, str], *, classes: bool) -> list[tuple[str, str]]:
    """Return names and values of the columns to show for a row of a list, with labels first."""
    labels = [name for name in _CLASSES if name in row]
    others = [name for name in row if name not in _SHOWN_ELSEWHERE and name not in labels]
    facts = []
    for name in [*labels, *others]:
        value = row[name]
        is_number = name in _NUMBERS or (name in labels and not classes and "." in value)
        is_long = len(value) > _LONG and _DECIMAL.fullmatch(value) is not None
        if value and (is_number or is_long):
            value = number(float(value), 3 if is_number else 4)
        facts.append((name.replace("_", " ") if name in labels else name, value))
    return facts

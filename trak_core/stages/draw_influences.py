"""Show samples: targets beside their strongest training samples, or the first ones of a list."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
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
from trak_core.lists.lists import few_targets
from trak_core.report.charts import TARGETS_IN_FIGURE, influences_figure
from trak_core.report.describe_samples import EACH, Examples, find_examples, targets_of_mean
from trak_core.report.explore_data import EACH_ON_PAGE, Answer, Tokens, explore
from trak_core.report.read_results import File, output_of, read_experiment, with_class_names
from trak_core.report.render import answer as answer_page
from trak_core.report.render import listed_samples, score_warnings
from trak_core.report.template_filters import anchor, number
from trak_core.spec import TRAIN
from trak_core.study.dataset_split import Split
from trak_core.study.read_targets import split_of
from trak_core.study.show_samples import (
    BEGINNING,
    Picture,
    are_drawn,
    contents_digest,
    short_text,
    show_sample,
    shown_tokens,
)
from trak_core.study.study import Study
from trak_core.system.files import harmless, written_whole
from trak_core.system.progress import blocks_with_progress

# Targets of a page, at most; their sizes may leave room for fewer.
_MOST_TARGETS = 20_000


# Rows of a list's page, and characters of a text there.
_N_ROWS, _CHARACTERS = 100, 600
_NUMBERS = frozenset({
    *("harm", "help", "score", "self_influence", "output", "closeness", "cosine")
})
# A decimal number of more characters is shown in four digits.
_DECIMAL, _LONG = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?"), 8
_CLASSES = ("label", "suggested_label", "prediction", "other_label")
# Columns that are said otherwise, or by the CSV alone.
_APART = frozenset({
    *("id", "rank", "other_id", "among", "worth_a_look", "output_sd", "loss_weight")
})


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
        rows = range(start, stop)
        texts += [short_text(study, split.ids[row], split.samples[row]) for row in rows]
    return pd.DataFrame({"id": split.ids, "text": texts})


def _few(scores: File) -> File:
    """Return what the figure shows of the scores."""
    shown = scores.tables["targets"].head(TARGETS_IN_FIGURE)
    top = scores.tables["top_influences"]
    is_kept = top["target_id"].isin(shown["id"]) & (top["rank"] <= EACH)
    tables = {"shown": shown, "top_influences": top.loc[is_kept, :]}
    return replace(scores, tables={**scores.tables, **tables})


def _self_influence(files: Sequence[Path], scores: File) -> pd.Series | None:
    """Return the self-influence of training samples by id, where there is a file."""
    for path in files:
        with open_artifact(path, SELF_INFLUENCE) as file:
            own = file.table("train")
        known = pd.Series(own["self_influence"].to_numpy(), index=own["id"].to_numpy())
        shown = scores.tables["train"]["id"].tolist()
        described = [i for i in shown if i in known.index]
        check_same("training samples", shown, described, file)
        return known
    return None


def _token_scores(files: Sequence[Path], scores: File) -> pd.DataFrame | None:
    """Return the scores of tokens, where there is a file; it must be about these scores."""
    for path in files:
        with open_artifact(path, TOKEN_SCORES) as file:
            check_same("scores", scores.content_hash, file.spec["scores"], file)
            return file.table("tokens")
    return None


def _explored(
    study: Study,
    scores: File,
    targets: Split,
    train: Split,
    self_influence: pd.Series | None,
    token_scores: pd.DataFrame | None,
) -> Answer:
    draws = are_drawn(study, train)
    places = {
        is_target: {sample_id: row for row, sample_id in enumerate(split.ids)}
        for is_target, split in ((True, targets), (False, train))
    }

    def show(is_target: bool, sample_id: Any, characters: int) -> tuple[Picture | str, bytes]:
        sample = (targets if is_target else train).samples[places[is_target][sample_id]]
        shown = show_sample(study, sample_id, sample, characters, draws)
        return shown, contents_digest(sample)

    def texts(is_target: bool, sample_id: Any, n_tokens: int) -> list[str]:
        sample = (targets if is_target else train).samples[places[is_target][sample_id]]
        return shown_tokens(study, sample_id, sample, n_tokens)

    described = study.has("describe")
    tokens = None if token_scores is None else Tokens.of(token_scores, texts)
    known = {"self_influence": self_influence, "tokens": tokens}
    return explore(scores, show, drawn=draws, described=described, **known)


def _write_texts(
    texts: Path, study: Study, answer: Answer, targets: Split, train: Split, code: str
) -> None:
    scores = answer.experiment
    influential = scores.attributes["influential"]
    if not study.has("describe"):  # no reason to read more samples than are shown
        shown = scores.tables["targets"]["id"].tolist()[: len(answer.targets)]
        targets, influential = targets.take(shown), scores.tables["top_influences"]["train_id"]
        influential = influential.unique().tolist()
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
    self_influence: Sequence[Path] = (),
    token_scores: Sequence[Path] = (),
    study_file: Path,
    question: Path | None = None,
    code: str,
) -> None:
    """Write a picture of some targets, a page to explore them all, and their texts as a table.

    The PNG ``figure`` has a row a target, its most helpful and most harmful samples beside it; the
    HTML ``answer`` has all targets, with longer texts. ``texts`` holds the beginnings of texts by
    id, of targets and of all training samples in ``top_influences``; for a study without
    ``describe(sample)``, what is printed of the samples on the page. The study's ``draw`` and
    ``describe`` show samples. ``self_influence`` is a file with that of training samples, and
    ``token_scores`` one with scores of tokens, which are coloured, if these are known. The study's
    ``token_texts(sample)`` says what stands for each token; else numbers do.
    """
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    experiment = read_experiment(scores, scores.parents[1], _MOST_TARGETS, EACH_ON_PAGE, train)
    experiment = with_class_names(experiment, study.class_names())
    ids = experiment.tables["targets"]["id"].tolist()
    targets = targets_of_mean(experiment)
    if targets is None:
        targets = split_of(study, experiment.spec["experiment"], ids, question)
    (examples,) = find_examples(study, [_few(experiment)], train, [targets])
    _draw(figure, examples)
    known = _self_influence(self_influence, experiment)
    tokens = _token_scores(token_scores, experiment)
    explored = _explored(study, experiment, targets, train, known, tokens)
    with written_whole(answer) as partial:
        partial.write_text(answer_page(explored, study.name), encoding="utf-8")
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
    """Write a page of a list's first 100 rows: pictures or texts, and what the CSV says of each.

    The samples are those of ``pool``, a file of samples beside the study; else the training
    samples. Copies stand in pairs: the other one may be a target of ``experiment``, whose own file
    is ``question``. ``scores`` are what suspects come from. The study's ``draw`` and ``describe``
    show samples.
    """
    # As texts, so that every number stands as the CSV has it.
    rows = pd.read_csv(listed, dtype=str, keep_default_na=False, encoding="utf-8")
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    samples = train if pool is None else split_of(study, "pool", None, pool)
    draws = are_drawn(study, samples)
    classes = bool(study.class_names())

    def shown(split: Split, cells: Sequence[str]) -> dict[str, tuple[Any, Picture | str]]:
        row_of = {str(harmless(i)): row for row, i in enumerate(split.ids)}
        places = {cell: row_of[cell] for cell in dict.fromkeys(cells)}
        return {
            cell: (
                split.ids[row],
                show_sample(study, split.ids[row], split.samples[row], _CHARACTERS, draws),
            )
            for cell, row in places.items()
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
            "facts": _facts(row, classes=classes),
            "samples": [("train" if pool is None else "pool", sample_id, sample)],
            "anchor": anchor(sample_id),
            "looks": row.get("worth_a_look") == "1",
        }
        if "other_id" in row:
            among = "train" if row["among"] == TRAIN else "target"
            entry["samples"].append((among, *others[row["among"]][row["other_id"]]))
        entries.append(entry)
    n_looks = rows["worth_a_look"].tolist().count("1") if "worth_a_look" in rows else 0
    files = [read_experiment(path, path.parents[1], 0, 0, train) for path in scores]
    few = [targets for file in files if few_targets(targets := file.tables["targets"])]
    markup = listed_samples(
        kind=kind,
        experiment=experiment,
        entries=entries,
        n_rows=len(rows),
        n_looks=n_looks,
        n_targets=sum(map(len, few)),
        output=output_of(files[0]) if files else None,
        warnings=[warning for file in files for warning in score_warnings(file)],
        has_self_influence="self_influence" in rows,
        suggests="suggested_label" in rows,
        has_pool=pool is not None,
        described=study.has("describe"),
        drawn=draws,
        study=study.name,
    )
    with written_whole(page) as partial:
        partial.write_text(markup, encoding="utf-8")
    print(f"{len(entries)} of {len(rows)} rows are on the page.")


def _facts(row: Mapping[str, str], *, classes: bool) -> list[tuple[str, str]]:
    """Return what a row says, its labels first."""
    known = [name for name in _CLASSES if name in row]
    names = [*known, *(name for name in row if name not in _APART and name not in known)]
    facts = []
    for name in names:
        is_number = name in _NUMBERS or (name in _CLASSES and not classes and "." in row[name])
        # Beyond this only the CSV has them.
        is_long = len(row[name]) > _LONG and _DECIMAL.fullmatch(row[name]) is not None
        is_shown_short = (is_number or is_long) and row[name]
        value = number(float(row[name]), 3 if is_number else 4) if is_shown_short else row[name]
        facts.append((name.replace("_", " ") if name in _CLASSES else name, value))
    return facts

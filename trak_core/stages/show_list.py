"""Show a list to act on: its first samples with their pictures or texts, as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trak_core.report.describe_samples import Picture, are_drawn, show_sample
from trak_core.report.read_results import read_experiment
from trak_core.report.render import listed_samples, score_warnings
from trak_core.report.template_filters import anchor, number
from trak_core.scoring.lists import few_targets
from trak_core.spec import TRAIN
from trak_core.study.read_split import Split
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study
from trak_core.system.files import harmless, written_whole

# Rows of a page, and characters of a text.
_N_ROWS, _CHARACTERS = 100, 600
_NUMBERS = frozenset({
    *("harm", "help", "score", "self_influence", "output", "closeness", "cosine")
})
_CLASSES = ("label", "suggested_label", "prediction", "other_label")
# Columns that are said otherwise, or by the CSV alone.
_APART = frozenset({
    *("id", "rank", "other_id", "among", "worth_a_look", "output_sd", "loss_weight")
})


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
    files = [read_experiment(path, path.parents[1], 0, 0) for path in scores]
    few = [targets for file in files if few_targets(targets := file.tables["targets"])]
    markup = listed_samples(
        kind=kind,
        experiment=experiment,
        entries=entries,
        n_rows=len(rows),
        n_looks=n_looks,
        n_targets=sum(map(len, few)),
        warnings=[warning for file in files for warning in score_warnings(file)],
        has_self_influence="self_influence" in rows,
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
        value = number(float(row[name])) if is_number and row[name] else row[name]
        facts.append((name.replace("_", " ") if name in _CLASSES else name, value))
    return facts

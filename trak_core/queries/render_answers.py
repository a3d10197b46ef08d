"""Show the answers of ``trak ask`` as an HTML page or as a table."""

import contextlib
import json
from collections.abc import Sequence

import pandas as pd

from trak_core.attribution.score_formulas import unit_of
from trak_core.queries.open_run import OpenRun
from trak_core.queries.question_and_answer import Answer
from trak_core.report.explore_data import explore
from trak_core.report.read_results import File, with_class_names, with_fit
from trak_core.report.render import experiment_page
from trak_core.study.dataset_split import Split
from trak_core.study.sample_columns import short_columns


def asked_page(run: OpenRun, answers: Sequence[Answer], k: int) -> str:
    """Return answers as an HTML page, which looks like the page of an experiment.

    For each answer, the page shows at most ``k`` training samples with a positive score and ``k``
    with a negative score.
    """
    with contextlib.chdir(run.run.folder):
        samples = {str(answer.asked.id): answer.asked.sample for answer in answers}
        targets = Split([*samples.values()], [*samples])
        file = with_class_names(_file(run, answers), run.study.class_names())
        by_id = {str(answer.asked.id): answer.tokens for answer in answers}
        tables = [table.assign(target_id=i) for i, table in by_id.items() if table is not None]
        tokens = pd.concat(tables, ignore_index=True) if tables else None
        explored = explore(file, run.study, run.train, targets, token_scores=tokens)
        return experiment_page(explored, run.study.name, k)


def _file(run: OpenRun, answers: Sequence[Answer]) -> File:
    """Return answers in the form in which the report reads an experiment's scores from a file."""
    spec, output_words = run.settings, run.run.specs.output_words
    fields = dict.fromkeys(name for answer in answers for name in answer.asked.fields)
    columns = {name: [answer.asked.fields.get(name) for answer in answers] for name in fields}
    labels = [str(answer.named(answer.target["label"])) for answer in answers]
    own = [answer.asked.own_label for answer in answers]
    asked = [label for label, own_label in zip(labels, own, strict=True) if own_label is not None]
    meaning = {}
    if asked:
        columns.pop("label", None)
        pairs = zip(labels, own, strict=True)
        columns["own_label"] = [label if o is None else str(o) for label, o in pairs]
        of_lines = ", or of the label in the line" if len(asked) < len(answers) else ""
        words = f"the more certain the model is of the class asked about, {asked[0]}{of_lines}"
        meaning = {"meaning": words}
    targets = pd.DataFrame([{**answer.target, "id": str(answer.asked.id)} for answer in answers])
    targets = targets.join(short_columns(columns))
    influences = pd.concat([answer.influences for answer in answers], ignore_index=True)
    known = run.columns.reset_index()
    attributes = {"unit": unit_of(spec), "most_harmful": [], "n_harmful": 0, "n_train": len(known)}
    attributes["output_words"] = None if output_words is None else json.dumps(output_words)
    file = File(
        name="",
        content_hash="",
        provenance={},
        spec=spec.as_dict()
        | {"experiment": "asked", "checkpoints": spec.checkpoints, "projection": run.projection},
        tables={
            "targets": targets,
            "shown": targets,
            "top_influences": influences,
            "train": known.loc[known["id"].isin(influences["train_id"]), :],
        },
        attributes=attributes | meaning,
    )
    return with_fit(file, known, run.train)


def answer_rows(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a table with a row for each training sample of each answer, with class names."""
    parts = []
    for answer in answers:
        names = {key: answer.train[key].map(answer.named) for key in ("label", "prediction")}
        rows = answer.influences[["target_id", "rank", "sign", "train_id", "score"]].assign(
            target_text=answer.text, target_output=answer.target["output"]
        )
        parts.append(rows.join(answer.train.assign(**names), on="train_id"))
    return pd.concat(parts, ignore_index=True)

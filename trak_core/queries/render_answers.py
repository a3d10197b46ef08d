"""Render answers: a page of HTML, like that of an experiment, or rows of a table."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from trak_core.attribution.scores import unit_of
from trak_core.queries.open_run import OpenRun
from trak_core.queries.question_and_answer import Answer
from trak_core.report.explore_data import Tokens, explore
from trak_core.report.read_results import File, with_class_names, with_fit
from trak_core.report.render import answer as rendered
from trak_core.study.sample_columns import short_columns
from trak_core.study.show_samples import Picture, are_drawn, contents_digest, show_sample


def asked_page(run: OpenRun, answers: Sequence[Answer], k: int) -> str:
    """Return the HTML page of some answers, with ``k`` training samples of either sign beside each.

    It is that of ``answers/{experiment}.html``, of an experiment without a file of scores.
    """
    with run.run.in_folder():
        samples = {str(answer.asked.id): answer.asked.sample for answer in answers}
        draws = are_drawn(run.study, run.train)

        def show(is_target: bool, sample_id: Any, characters: int) -> tuple[Picture | str, bytes]:
            sample = samples[sample_id] if is_target else run.sample(sample_id)
            shown = show_sample(run.study, sample_id, sample, characters, draws)
            return shown, contents_digest(sample)

        described = run.study.has("describe")
        file = with_class_names(_file(run, answers), run.study.class_names())
        tokens = _tokens(answers)
        explored = explore(file, show, drawn=draws, described=described, tokens=tokens)
        return rendered(explored, run.study.name, k)


def _file(run: OpenRun, answers: Sequence[Answer]) -> File:
    """Return answers as what a page shows of an experiment's scores."""
    spec, words = run.run.specs.self_influence, run.run.specs.output_words
    fields = dict.fromkeys(name for answer in answers for name in answer.asked.fields)
    columns = {name: [answer.asked.fields.get(name) for answer in answers] for name in fields}
    targets = pd.DataFrame([dict(answer.target) for answer in answers])
    targets["id"] = [str(answer.asked.id) for answer in answers]
    own_labels = [answer.asked.own_label for answer in answers]
    if own_labels != [None] * len(answers):
        columns["own_label"] = own_labels
    targets = targets.join(short_columns(columns))
    influences = pd.concat([_influences(answer) for answer in answers], ignore_index=True)
    file_spec = spec.as_dict() | {"experiment": "asked", "checkpoints": spec.checkpoints}
    file_spec["projection"] = run.projection
    file = File(
        name="",
        content_hash="",
        provenance={},
        spec=file_spec,
        tables={
            "targets": targets,
            "shown": targets,
            "top_influences": influences,
            "train": run.columns.loc[influences["train_id"].unique(), :].reset_index(),
        },
        attributes={
            "unit": unit_of(spec),
            "output_words": None if words is None else json.dumps(words),
            "n_train": len(run.train.ids),
            "most_harmful": [],
            "n_harmful": 0,
        },
    )
    return with_fit(file, run.columns.reset_index(), run.train)


def _tokens(answers: Sequence[Answer]) -> Tokens | None:
    """Return the scores of tokens, where answers have some."""
    cut = {str(answer.asked.id): answer for answer in answers if answer.tokens is not None}
    if not cut:
        return None
    texts: dict[tuple[bool, Any], list[str]] = {}
    for target_id, answer in cut.items():
        texts[True, target_id] = answer.tokens_of()["text"].tolist()
        for train_id in answer.top["train_id"]:
            texts[False, train_id] = answer.tokens_of(train_id)["text"].tolist()
    tables = [answer.tokens.assign(target_id=target) for target, answer in cut.items()]  # pyright: ignore[reportOptionalMemberAccess]
    whole = pd.concat(tables, ignore_index=True)
    return Tokens.of(whole, lambda is_target, sample_id, _: texts[is_target, sample_id])


def _influences(answer: Answer) -> pd.DataFrame:
    """Return the strongest training samples as the table ``top_influences`` has them."""
    top = answer.top
    sign = np.sign(top["score"].to_numpy()).astype(int)
    n_up = int((sign > 0).sum())
    ranks = [*range(1, n_up + 1), *range(len(top) - n_up, 0, -1)]
    rows = pd.DataFrame({
        "target_id": str(answer.asked.id),
        "rank": ranks,
        "sign": sign,
        "train_id": top["train_id"],
        "train_label": top["label"],
        "score": top["score"],
    })
    return rows.sort_values(["sign", "rank"], ascending=[False, True], kind="stable")


def answer_rows(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a row for each strong training sample of each answer, to be written as a table.

    Classes have their names, where the study has some.
    """
    parts = []
    for answer in answers:
        rows = _influences(answer)[["target_id", "rank", "sign"]]
        rows = rows.assign(target_text=answer.text, target_output=answer.target["output"])
        names = {key: answer.top[key].map(answer.named) for key in ("label", "prediction")}
        parts.append(rows.join(answer.top.assign(**names)))
    return pd.concat(parts, ignore_index=True)

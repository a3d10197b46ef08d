"""Show answers as the page that a run makes of an experiment, or as the rows of a table."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from trak_core.queries.answer import Answer
from trak_core.queries.held_run import HeldRun
from trak_core.report.describe_samples import find_examples
from trak_core.report.read import File
from trak_core.report.render import answer as rendered
from trak_core.scoring.scores import unit_of
from trak_core.spec import EXACT
from trak_core.study.split import Split

# Characters of a text on the page.
_CHARACTERS = 1000


def answer_page(held: HeldRun, answers: Sequence[Answer], k: int) -> str:
    """Return the HTML page of some answers, with ``k`` training samples of either sign beside each.

    It is that of ``answers/{experiment}.html``, of an experiment without a file of scores.
    """
    spec = held.specs.self_influence
    with held.run.in_folder():
        targets = pd.DataFrame([answer.target for answer in answers]).infer_objects()
        targets["id"] = [str(answer.asked.id) for answer in answers]
        influences = pd.concat([_influences(answer) for answer in answers])
        file_spec = spec.as_dict() | {"experiment": "asked", "checkpoints": spec.checkpoints}
        file_spec["projection"] = {"kind": EXACT} if held.specs.is_exact else held.projection
        file = File(
            name="",
            content_hash="",
            provenance={},
            spec=file_spec,
            tables={"targets": targets, "shown": targets, "top_influences": influences},
            attributes={"unit": unit_of(spec), "n_train": len(held.train.ids)},
        )
        samples = [answer.asked.sample for answer in answers]
        split = Split(samples, targets["id"].tolist())
        (examples,) = find_examples(held.study, [file], held.train, [split], _CHARACTERS)
        return rendered(examples, held.study.path.name, k)


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
    """Return a row for each strong training sample of each answer, to be written as a table."""
    parts = []
    for answer in answers:
        rows = _influences(answer)[["target_id", "rank", "sign"]]
        rows = rows.assign(target_text=answer.text, target_output=answer.target["output"])
        parts.append(rows.join(answer.top))
    return pd.concat(parts, ignore_index=True)

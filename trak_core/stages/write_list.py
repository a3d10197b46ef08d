"""Write a list of training samples to act on, best first, as a CSV."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from trak_core.artifacts import SCORES, SELF_INFLUENCE, check_same, open_artifact
from trak_core.scoring.lists import by_score, suspects
from trak_core.system.files import write_csv


def write_list(
    *,
    listed: Path,
    scores: Path,
    self_influence: Sequence[Path] = (),
    kind: str,
    fraction: float = 1.0,
    code: str,
) -> None:
    """Write ``suspects``, ``drop`` or ``select`` (``kind``) of an experiment's scores.

    ``fraction`` is the part of the training samples that ``select`` takes. ``self_influence`` is
    a file with one more column for ``suspects``.
    """
    with open_artifact(scores, SCORES) as file:
        train = file.table("train")
    for path in self_influence:
        with open_artifact(path, SELF_INFLUENCE) as file:
            own = file.table("train")
        ids = train["id"].tolist(), own["id"].tolist()
        check_same("training samples", *ids, path, SELF_INFLUENCE.rule)
        train["self_influence"] = own["self_influence"]
    rows = suspects(train) if kind == "suspects" else _by_score(train, kind, fraction)
    write_csv(listed, rows)
    if kind == "suspects":
        n_looks = rows["worth_a_look"].to_numpy().sum()
        print(
            f"{n_looks} of {len(rows)} training samples push targets down more than up: look at "
            "these first, in their order."
        )


def _by_score(train: pd.DataFrame, kind: str, fraction: float) -> pd.DataFrame:
    is_select = kind == "select"
    rows = by_score(train, best=is_select, fraction=fraction)
    of = "push targets up most" if is_select else "push targets down on the whole"
    print(f"{len(rows)} of {len(train)} training samples {of}.")
    return rows

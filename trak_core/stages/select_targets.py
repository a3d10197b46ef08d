"""Select the targets of an experiment by a condition on their columns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    OUTPUTS,
    TARGETS,
    check_made_for,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.score_formulas import most_frequent
from trak_core.errors import InputError
from trak_core.settings import FeaturesSpec
from trak_core.settings.target_filter import MOST_TARGETS, Condition
from trak_core.stages._shared import PER_SAMPLE


def select_targets(
    *,
    targets: Path,
    outputs: Sequence[Path],
    spec: FeaturesSpec,
    experiment: str,
    where: str,
    targets_digest: str,
    study_file: Path | None = None,
    code: str,
) -> None:
    """Write a table of the samples of ``target_data()`` that satisfy the condition ``where``.

    ``outputs`` contains a file for the last checkpoint of each run, made for ``spec``. A condition
    can use the columns id, label, prediction, output and output_sd, and those that the study's
    ``target_columns()`` returns.
    """
    ids: list[Any] = []
    parts, hashes = [], []
    for path in outputs:
        with open_artifact(path, OUTPUTS) as file:
            check_made_for(file, spec.under(file.spec["checkpoint"]["id"]))
            parts.append([file.vector(name) for name in PER_SAMPLE])
            ids = ids or file.ids("sample_ids")
            check_same("targets", ids, file.ids("sample_ids"), file)
            hashes.append(file.content_hash)
    labels = parts[0][0]
    values, predictions = (np.stack([part[i] for part in parts]) for i in (1, 2))
    is_class = predictions.dtype.kind != "f"
    common = most_frequent(predictions, labels, values) if is_class else predictions.mean(axis=0)
    table = pd.DataFrame({
        "id": ids,
        "label": labels,
        "prediction": common,
        "output": values.mean(axis=0, dtype=np.float64).astype(np.float32),
        "output_sd": values.std(axis=0, dtype=np.float64).astype(np.float32),
    })
    if study_file is not None:
        # These modules import torch, so they are imported only if they are needed.
        from trak_core.study.sample_columns import columns_of
        from trak_core.study.study import Study

        table = table.join(columns_of(Study.load(study_file), experiment, ids))
    condition = Condition.parse(where)
    condition.check_columns(table.columns)
    is_match = condition.holds({name: np.asarray(table[name]) for name in table})
    matches = table.loc[is_match, :].reset_index(drop=True)
    if not 0 < len(matches) <= MOST_TARGETS:
        raise InputError(
            f"experiments.{experiment}: `where: {where}` must match 1 to {MOST_TARGETS} targets. "
            f"Found {len(matches)} of {len(table)}. Change the condition, or set `targets` to "
            "`all` or to a table of ids instead.",
            code="stages.matches",
        )
    file_spec: dict[str, Any] = {
        "experiment": experiment,
        "where": where,
        "targets_digest": targets_digest,
    }
    file_spec["outputs"] = hashes
    with create(targets, TARGETS, file_spec, software(code, "cpu", "numpy", "pandas")) as writer:
        writer.table("targets", matches, ["id"])
    print(f"{len(matches)} of {len(table)} targets match {where}")

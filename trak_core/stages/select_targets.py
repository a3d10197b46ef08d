"""Select the targets of an experiment by what its config says of their columns."""

from collections.abc import Sequence
from pathlib import Path

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
from trak_core.attribution.scores import most_frequent
from trak_core.errors import InputError
from trak_core.spec import FeaturesSpec
from trak_core.spec.target_filter import MOST_TARGETS, Condition


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
    """Write the samples of ``target_data()`` for which ``where`` is true, in the study's order.

    ``outputs`` are files of the last checkpoint of every run, made for ``spec``. The columns are
    those of the table ``targets`` of scores, with the study's own if there is a ``study_file``.
    """
    parts, hashes = [], []
    for path in outputs:
        with open_artifact(path, OUTPUTS) as file:
            check_made_for(file, spec.under(file.spec["checkpoint"]["id"]))
            names = ("labels", "outputs", "predictions")
            parts.append((file.ids("sample_ids"), *(file.vector(name) for name in names)))
            hashes.append(file.content_hash)
            check_same("targets", parts[0][0], parts[-1][0], file)
    (ids, *_), (labels, *_) = ([part[i] for part in parts] for i in (0, 1))
    values, predictions = (np.stack([part[i] for part in parts]) for i in (2, 3))
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
        # Only here, because it brings torch.
        from trak_core.study.sample_columns import columns_of
        from trak_core.study.study import Study

        table = table.join(columns_of(Study.load(study_file), experiment, ids))
    condition = Condition.parse(where)
    condition.check_columns(table.columns)
    holds = condition.holds({name: np.asarray(table[name]) for name in table})
    matches = table.loc[holds, :].reset_index(drop=True)
    if not 0 < len(matches) <= MOST_TARGETS:
        few = "`targets: all` takes every sample, and a table of ids any of them."
        raise InputError(
            f"experiments.{experiment}: `where: {where}` must match 1 to {MOST_TARGETS} targets. "
            f"Found {len(matches)} of {len(table)}. {few}",
            code="stages.matches",
        )
    file_spec = {"experiment": experiment, "where": where, "targets_digest": targets_digest}
    made_by = software(code, "cpu", "numpy", "pandas")
    with create(targets, TARGETS, file_spec | {"outputs": hashes}, made_by) as writer:
        writer.table("targets", matches, ["id"])
    print(f"{len(matches)} of {len(table)} targets match {where}")

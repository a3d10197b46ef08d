"""Select the targets of an experiment by a condition on their columns."""

from collections.abc import Sequence
from contextlib import ExitStack
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
from trak_core.attribution.fitted_checkpoint import training_table
from trak_core.errors import InputError
from trak_core.settings import FeaturesSpec
from trak_core.settings.target_filter import MOST_TARGETS, Condition


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
    """Write a table of the samples in ``target_data()`` that satisfy the condition ``where``.

    ``outputs`` contains a file of model outputs for the last checkpoint of each run, with the
    settings ``spec``. The condition can use the columns id, label, prediction, output and
    output_sd, and those that the study's ``target_columns()`` returns.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_artifact(path, OUTPUTS)) for path in outputs]
        for file in files:
            check_made_for(file, spec.under(file.spec["checkpoint"]["id"]))
            check_same("targets", files[0].ids("sample_ids"), file.ids("sample_ids"), file)
        # Despite its name, training_table also reads files of targets.
        table = pd.DataFrame(training_table(files))
        values = np.stack([file.vector("outputs") for file in files])
        table["output_sd"] = values.std(axis=0, dtype=np.float64)
        table = table.astype({"output": np.float32, "output_sd": np.float32})
        hashes = [file.content_hash for file in files]
    if study_file is not None:
        # These modules import torch, which takes seconds, so they are imported only here.
        from trak_core.study.sample_columns import columns_of
        from trak_core.study.study import Study

        ids = table["id"].tolist()
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
    file_spec = {"experiment": experiment, "where": where, "targets_digest": targets_digest}
    file_spec |= {"outputs": hashes}
    with create(targets, TARGETS, file_spec, software(code, "cpu", "numpy", "pandas")) as writer:
        writer.table("targets", matches, ["id"])
    print(f"{len(matches)} of {len(table)} targets match {where}")

"""Combine the scores of all checkpoints into the scores of an experiment."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import FEATURES, SCORES, create, open_artifact, software
from trak_core.artifacts.format import plain_ids
from trak_core.attribution.combine_checkpoints import (
    KeptScores,
    add_improving_signs,
    fast_rows,
    influence_table,
    sample_table,
)
from trak_core.attribution.fitted_checkpoint import score_rows
from trak_core.attribution.score_formulas import unit_of
from trak_core.config.memory_needs import average_need, holds_solved
from trak_core.model_outputs.about_outputs import about_output
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import POOL, TRAIN, ScoresSpec
from trak_core.stages._shared import open_checkpoint_scores, stored_similarities

_SIGN = (
    "positive: the training sample pushes the target's model output up. The sum of a subset's "
    "scores predicts how training on the subset changes the output"
)


def _with_study_columns(
    table: dict[str, np.ndarray], study_file: Path | None, question: Path | None, name: str
) -> dict[str, np.ndarray] | pd.DataFrame:
    """Return a table of samples after adding their user-defined columns.

    If the samples are in a file of rows, ``question`` is this file, and its fields are the columns.
    Otherwise, the study defines the columns. ``name`` is the name of the samples' split.
    """
    if (question is None or question.suffix == ".py") and study_file is None:
        return table
    # These modules import torch, which takes seconds, so they are imported only here.
    from trak_core.study.sample_columns import columns_of
    from trak_core.study.study import Study

    study = None if study_file is None else Study.load(study_file)
    columns = columns_of(study, name, plain_ids(table["id"]), question)
    if columns.columns.empty:
        return table
    plain = {key: plain_ids(v) if v.dtype.kind == "S" else v for key, v in table.items()}
    return pd.DataFrame(plain).join(columns)


def average_scores(
    *,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    features: Sequence[Path],
    spec: ScoresSpec,
    defaults: str,
    columns: str,
    top: int,
    output_words: Mapping[str, Any] | None = None,
    study_file: Path | None = None,
    question: Path | None = None,
    pool: Path | None = None,
    code: str,
    memory_mb: int,
) -> None:
    """Combine the similarities and loss weights of all checkpoints into an experiment's scores.

    With ``keep: top_k``, the files ``checkpoint_scores`` contain no similarities. They are computed
    from ``features``, which then contains a file for each checkpoint. For each target, the ``top``
    largest positive scores and as many negative scores are written to a table.

    If the scored samples are not the training samples, ``pool`` is the file that contains them. The
    tables of samples also contain the columns that this file, ``question`` and the study define.

    The attributes of the file contain ``columns`` (the meaning of labels and predictions),
    ``defaults`` (the settings that the config leaves out) and ``output_words`` (the description of
    a user-defined model output).
    """
    assert spec.loss_weight_power is not None
    with ExitStack() as stack:
        parts = open_checkpoint_scores(stack, checkpoint_scores, spec)
        phis = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        n_train, n_targets = (len(parts[0].vector(f"{side}_ids")) for side in ("train", "target"))
        solved_dim = spec.features.projection["proj_dim"] if phis else None
        need = average_need(
            n_train=n_train,
            n_targets=n_targets,
            n_checkpoints=len(parts),
            top=top,
            solved_dim=solved_dim,
        )
        largest_block = need.rows(memory_mb)
        block = min(largest_block, fast_rows(n_targets))
        solved_size = (solved_dim or 0) * n_targets
        in_memory = holds_solved(need, block, memory_mb, len(parts), solved_size)
        # If matrices must be read again for each block of rows, few large blocks are faster.
        if not in_memory:
            block = largest_block
        file_spec = spec.as_dict() | {
            "projection": {k: v for k, v in parts[0].spec["projection"].items() if k != "stream"},
            "checkpoints": [part.spec["checkpoint"] for part in parts],
        }
        made_from = [part.provenance for part in parts]
        provenance = software(code, "cpu", "numpy", "pandas", made_from=made_from)
        # The outputs and predictions in the tables are from the last checkpoint of each run.
        ends = [parts[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        targets, train = (sample_table(ends, side, block) for side in ("target", "train"))
        about = about_output({**(output_words or {}), "function": spec.features.model_output})
        labels = targets["label"] if about.labels_are_classes else None
        add_improving_signs(targets, about)
        rows = stored_similarities(parts, phis, normalize=spec.normalize, in_memory=in_memory)
        read_scores = score_rows(parts, rows, spec)
        own_output = {} if output_words is None else {"model_output": json.dumps(output_words)}
        with create(
            scores,
            SCORES,
            file_spec,
            provenance,
            unit=unit_of(spec),
            sign=_SIGN,
            columns=columns,
            defaults=defaults or "none: the config sets everything",
            n_checkpoints=len(parts),
            n_runs=len(ends),
            damping=float(spec.damping),
            weighting=spec.weighting,
            combine=str(spec.combine),
            loss_weight_power=float(spec.loss_weight_power),
            normalize=int(spec.normalize),
            **own_output,
        ) as writer:
            values = None
            if not phis:
                values = writer.matrix("scores", train["id"], targets["id"], chunks=(1024, 64))

            def blocks() -> Iterator[tuple[int, np.ndarray]]:
                """Compute and write the scores in blocks. Yield each first row and its block."""
                for start, stop in blocks_with_progress(n_train, block, "training samples"):
                    combined = read_scores(start, stop).astype(np.float32)
                    if values is not None:
                        values[start:stop] = combined
                    yield start, combined

            kept = KeptScores.of(blocks(), targets.get("improves"), labels, top)
            train |= kept.by_sample
            table = _with_study_columns(targets, study_file, question, str(spec.experiment))
            writer.table("targets", table, ["id"])
            table = _with_study_columns(train, study_file, pool, POOL if pool else TRAIN)
            writer.table("train", table, ["id"])
            # pandas's queries have a function `sign`, so the column `sign` cannot be searched.
            searchable = ["target_id", "rank", "train_id", "score"]
            writer.table("top_influences", influence_table(kept, train, targets), searchable)

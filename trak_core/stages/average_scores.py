"""Average an experiment's scores over all checkpoints, in one job or in shards of rows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    FEATURES,
    SCORES,
    SCORES_SHARD,
    Artifact,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.artifacts.format import plain_ids
from trak_core.artifacts.write import MatrixWriter
from trak_core.attribution.combine_checkpoints import (
    KeptScores,
    add_improving_signs,
    fast_rows,
    influence_table,
    sample_table,
)
from trak_core.attribution.fitted_checkpoint import score_rows
from trak_core.attribution.score_formulas import unit_of
from trak_core.config.memory_needs import average_need, holds_solved, shard_rows
from trak_core.model_outputs.about_outputs import about_output
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import POOL, TRAIN, ScoresSpec
from trak_core.stages._shared import copy_rows, open_checkpoint_scores, stored_similarities

_CHUNKS = (1024, 64)
_SIGN = (
    "positive: the training sample pushes the target's model output up. The sum of a subset's "
    "scores predicts how training on the subset changes the output"
)


def _with_study_columns(
    table: dict[str, np.ndarray], study_file: Path | None, question: Path | None, name: str
) -> dict[str, np.ndarray] | pd.DataFrame:
    """Return a table of samples with the columns that the study, or a file of samples, adds.

    ``question`` is this file. ``name`` is the split to which the samples belong.
    """
    if (question is None or question.suffix == ".py") and study_file is None:
        return table
    # These modules import torch, so they are imported only if they are needed.
    from trak_core.study.sample_columns import columns_of
    from trak_core.study.study import Study

    study = None if study_file is None else Study.load(study_file)
    columns = columns_of(study, name, plain_ids(table["id"]), question)
    if columns.columns.empty:
        return table
    plain = {key: plain_ids(v) if v.dtype.kind == "S" else v for key, v in table.items()}
    return pd.DataFrame(plain).join(columns)


def _check_shards(
    shards: Sequence[Artifact], file_spec: dict, made_of: list[str], n_train: int, top: int
) -> None:
    """Raise an error if shards do not belong to these scores, are incomplete or in wrong order."""
    for number, shard in enumerate(shards, start=1):
        spec = {key: value for key, value in shard.spec.items() if key != "shard"}
        check_same("specification of shards", file_spec, spec, shard)
        stored = dict(shard.spec.get("shard") or {})
        check_same("scores under the checkpoints", made_of, stored.pop("made_of", None), shard)
        rows = list(shard_rows(n_train, number, len(shards)))
        expected = {"rows": rows, "number": number, "of": len(shards), "top": top}
        check_same("order of shards", expected, stored, shard)


def average_scores(
    *,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    features: Sequence[Path],
    shards: Sequence[Path] = (),
    spec: ScoresSpec,
    defaults: str,
    columns: str,
    top: int,
    output_words: Mapping[str, Any] | None = None,
    study_file: Path | None = None,
    question: Path | None = None,
    pool: Path | None = None,
    shard: int = 1,
    n_shards: int = 1,
    code: str,
    memory_mb: int,
) -> None:
    """Combine the similarities and loss weights of all checkpoints into an experiment's scores.

    If ``n_shards`` is above 1, the file contains only the scores of the training samples in one
    ``shard``, numbered from 1. A later call joins the files ``shards``, which are in order. The
    joined scores are bitwise equal to scores computed in one job.

    With ``keep: top_k``, the files ``checkpoint_scores`` contain no similarities, and ``features``
    contains each checkpoint's features to compute them. ``top`` is the number of largest scores of
    each sign to keep for each target. ``pool`` is the file of the scored samples if they are not
    the training samples. Columns from this file, from ``question`` and from the study are added to
    the tables. The file also stores ``columns`` (the meaning of labels and predictions),
    ``defaults`` (the settings that the config leaves out) and ``output_words`` (the description of
    a user-defined model output).
    """
    assert spec.loss_weight_power is not None
    with ExitStack() as stack:
        parts = open_checkpoint_scores(stack, checkpoint_scores, spec)
        phis = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        pieces = [stack.enter_context(open_artifact(path, SCORES_SHARD)) for path in shards]
        n_train, target_ids = len(parts[0].vector("train_ids")), parts[0].vector("target_ids")
        n_targets = len(target_ids)
        solved_dim = spec.features.projection["proj_dim"] if phis else None
        sizes: dict[str, Any] = {"n_targets": n_targets, "n_checkpoints": len(parts)}
        sizes |= {"top": top, "solved_dim": solved_dim}
        largest_block = average_need(n_train=n_train, **sizes).rows(memory_mb)
        block = min(largest_block, fast_rows(n_targets))
        start, stop = shard_rows(n_train, shard, n_shards)
        shard_need = average_need(n_train=stop - start, **sizes)
        solved_size = (solved_dim or 0) * n_targets
        in_memory = holds_solved(shard_need, block, memory_mb, len(parts), solved_size)
        # If all solved targets are read again for each block, large blocks are faster.
        if not in_memory:
            block = largest_block
        file_spec = spec.as_dict() | {
            "projection": {k: v for k, v in parts[0].spec["projection"].items() if k != "stream"},
            "checkpoints": [part.spec["checkpoint"] for part in parts],
        }
        made_of = [part.content_hash for part in parts]
        made_from = [part.provenance for part in parts]
        provenance = software(code, "cpu", "numpy", "pandas", made_from=made_from)
        # The tables contain outputs and predictions of the last checkpoint of each run.
        ends = [parts[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        targets = sample_table(ends, "target", block)
        about = about_output({**(output_words or {}), "function": spec.features.model_output})
        labels = targets["label"] if about.labels_are_classes else None
        add_improving_signs(targets, about)
        improves = targets.get("improves")

        def blocks(values: MatrixWriter | None) -> Iterator[tuple[int, np.ndarray]]:
            """Yield the first row and the scores of each block, after writing it to ``values``."""
            rows = stored_similarities(parts, phis, normalize=spec.normalize, in_memory=in_memory)
            read_scores = score_rows(parts, rows, spec)
            for i, j in blocks_with_progress(stop - start, block, "training samples"):
                combined = read_scores(start + i, start + j).astype(np.float32)
                if values is not None:
                    values[i:j] = combined
                yield start + i, combined

        if n_shards > 1:
            about_shard = {"rows": [start, stop], "number": shard, "of": n_shards, "top": top}
            file_spec["shard"] = about_shard | {"made_of": made_of}
            with create(scores, SCORES_SHARD, file_spec, provenance) as writer:
                values = None
                if not phis and stop > start:
                    train_ids = parts[0].vector("train_ids", start, stop)
                    values = writer.matrix("scores", train_ids, target_ids, chunks=_CHUNKS)
                KeptScores.of(blocks(values), improves, labels, top).write(writer, target_ids)
            return
        train = sample_table(ends, "train", block)
        if pieces:
            _check_shards(pieces, file_spec, made_of, n_train, top)
            # With few training samples, some shards have no rows.
            pieces = [piece for piece in pieces if piece.has("helpful")]
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
            if pieces[0].has("scores") if pieces else not phis:
                values = writer.matrix("scores", train["id"], targets["id"], chunks=_CHUNKS)
            if pieces:
                if values is not None:
                    copy_rows(pieces, "scores", values, block)
                kept_scores = KeptScores.of_shards(pieces, top)
            else:
                kept_scores = KeptScores.of(blocks(values), improves, labels, top)
            train |= kept_scores.by_sample
            own = targets, study_file, question, str(spec.experiment)
            writer.table("targets", _with_study_columns(*own), ["id"])
            own = train, study_file, pool, POOL if pool else TRAIN
            writer.table("train", _with_study_columns(*own), ["id"])
            # `sign` is not searchable, because pandas's queries have a function of this name.
            searchable = ["target_id", "rank", "train_id", "score"]
            writer.table("top_influences", influence_table(kept_scores, train, targets), searchable)

"""Average the checkpoints of an experiment into its scores, in one piece or in shards of rows."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    FEATURES,
    SCORES,
    SCORES_SHARD,
    Artifact,
    Writer,
    check_same,
    check_together,
    checkpoint_scores_kind,
    create,
    open_artifact,
    software,
)
from trak_core.artifacts.format import plain_ids
from trak_core.attribution.combine_checkpoints import (
    KeptScores,
    add_improving_signs,
    fast_rows,
    influence_table,
    mean,
    sample_table,
    summarized,
)
from trak_core.attribution.fitted_checkpoint import score_rows
from trak_core.attribution.scores import unit_of
from trak_core.config.memory_needs import average_need, holds_solved, shard_rows
from trak_core.model_outputs.about_outputs import about_output
from trak_core.spec import MEAN_OF, POOL, TRAIN, ScoresSpec
from trak_core.stages._shared import stored_similarities
from trak_core.system.progress import blocks_with_progress


def _own_columns(
    study_file: Path | None, question: Path | None, name: str, stored_ids: np.ndarray
) -> pd.DataFrame:
    """Return what the study, or a file of samples, knows of the samples of a table."""
    if (question is None or question.suffix == ".py") and study_file is None:
        return pd.DataFrame(index=range(len(stored_ids)))
    # Only here, because it brings torch.
    from trak_core.study.sample_columns import columns_of
    from trak_core.study.study import Study

    study = None if study_file is None else Study.load(study_file)
    return columns_of(study, name, plain_ids(stored_ids), question)


def _with_own(
    table: dict[str, np.ndarray], own: pd.DataFrame
) -> dict[str, np.ndarray] | pd.DataFrame:
    """Return a table with columns of the study's own, as pandas has it if there are any."""
    if own.columns.empty:
        return table
    plain = {key: plain_ids(v) if v.dtype.kind == "S" else v for key, v in table.items()}
    return pd.DataFrame(plain).join(own)


def _shard_scores(shards: Sequence[Artifact], block: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the scores in shards, block of rows by block of rows, each with its first row."""
    first = 0
    for shard in shards:
        values = shard.matrix("scores")
        for start in range(0, len(values), block):
            yield first + start, values[start : start + block]
        first += len(values)


def _check_shards(
    shards: Sequence[Artifact], file_spec: dict, made_of: list[str], n_train: int, top: int
) -> None:
    """Refuse shards of other scores, or that are not all rows in order."""
    for number, shard in enumerate(shards, start=1):
        own = {key: value for key, value in shard.spec.items() if key != "shard"}
        check_same("specification of shards", file_spec, own, shard)
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
    mean_of: str | None = None,
    pool: Path | None = None,
    shard: int = 1,
    n_shards: int = 1,
    code: str,
    memory_mb: int,
) -> None:
    """Combine A_c and loss weights over all checkpoints, block of rows by block of rows.

    There are scores for each checkpoint, and training features where only the solved targets were
    kept. ``top`` influences of either sign are kept for each target. Into the file come, in words,
    ``columns``: what labels and predictions are; ``defaults``: what the config left open; and
    ``output_words``: what it says of a model output of its own, None for one with a name here. A
    ``study_file``, and the experiment's own file of targets (``question``), bring columns.
    ``mean_of`` says in words what the one target is the mean of, None for targets out of data.
    Scores of a ``pool``, the study's samples in this file, have them in place of training samples.

    With ``n_shards`` above 1 the file holds what one ``shard`` of the training samples gives, from
    1 on. From the files of all ``shards``, in order, comes the file that one piece would be, to
    the last bit.
    """
    assert spec.loss_weight_power is not None
    with ExitStack() as stack:
        kind = checkpoint_scores_kind(spec.features.projection)
        kind = kind if mean_of is None else replace(kind, rule="average_targets")
        parts = [stack.enter_context(open_artifact(path, kind)) for path in checkpoint_scores]
        phis = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        pieces = [stack.enter_context(open_artifact(path, SCORES_SHARD)) for path in shards]
        check_together(parts, spec)
        n_train, n_targets = len(parts[0].vector("train_ids")), len(parts[0].vector("target_ids"))
        solved_dim = spec.features.projection["proj_dim"] if phis else None
        sizes: dict[str, Any] = {"n_targets": n_targets, "n_checkpoints": len(parts)}
        sizes |= {"top": top, "solved_dim": solved_dim}
        largest_block = average_need(n_train=n_train, **sizes).rows(memory_mb)
        block = min(largest_block, fast_rows(n_targets))
        start, stop = shard_rows(n_train, shard, n_shards)
        own_need = average_need(n_train=stop - start, **sizes)
        size = (solved_dim or 0) * n_targets
        in_memory = holds_solved(own_need, block, memory_mb, len(parts), size)
        if not in_memory:  # then every block reads them again
            block = largest_block
        file_spec = spec.as_dict() | {
            "projection": {k: v for k, v in parts[0].spec["projection"].items() if k != "stream"},
            "checkpoints": [part.spec["checkpoint"] for part in parts],
        }
        made_from = [part.provenance for part in parts]
        made_of = [part.content_hash for part in parts]
        provenance = software(code, "cpu", "numpy", "pandas", made_from=made_from)
        # Early checkpoints count for the scores; what models say is what they say in the end.
        ends = [parts[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        targets = sample_table(ends, "target", block)
        about = about_output({**(output_words or {}), "function": spec.features.model_output})
        has_classes = about.labels_are_classes and mean_of is None
        labels = targets["label"] if has_classes else None
        add_improving_signs(targets, about, is_mean=mean_of is not None)
        improves = targets.get("improves")

        def blocks() -> Iterator[tuple[int, np.ndarray]]:
            """Yield scores of the shard, or of all, from all checkpoints."""
            rows = [
                stored_similarities(part, phi, normalize=spec.normalize, in_memory=in_memory)
                for part, phi in zip(parts, phis or [None] * len(parts), strict=True)
            ]
            read_scores = score_rows(parts, rows, spec)
            for i, j in blocks_with_progress(stop - start, block, "training samples"):
                yield start + i, read_scores(start + i, start + j).astype(np.float32)

        if n_shards > 1:
            own = {"rows": [start, stop], "number": shard, "of": n_shards, "top": top}
            file_spec["shard"] = own | {"made_of": made_of}
            with create(scores, SCORES_SHARD, file_spec, provenance) as writer:
                taken = blocks()
                if not phis and stop > start:
                    ids = parts[0].vector("train_ids", start, stop), parts[0].vector("target_ids")
                    taken = _written(writer, *ids, start, taken)
                seen = KeptScores.of(taken, improves, labels, top)
                seen.write(writer, parts[0].vector("target_ids"))
            return
        train = sample_table(ends, "train", block)
        (train["loss_weight"],) = summarized(ends, "loss_weights", n_train, block, mean)
        if pieces:
            _check_shards(pieces, file_spec, made_of, n_train, top)
        own_output = {} if output_words is None else {"model_output": json.dumps(output_words)}
        with create(
            scores,
            SCORES,
            file_spec,
            provenance,
            unit=unit_of(spec),
            sign=(
                "positive: the training sample pushes the target's model output up; scores of a "
                "subset add up to a prediction of how the output moves when trained on it"
            ),
            columns=columns,
            defaults=defaults or "none: the config says everything",
            n_checkpoints=len(parts),
            n_runs=len(ends),
            damping=float(spec.damping),
            weighting=spec.weighting,
            combine=str(spec.combine),
            loss_weight_power=float(spec.loss_weight_power),
            normalize=int(spec.normalize),
            **own_output,
        ) as writer:
            ids = train["id"], targets["id"]
            if pieces:
                # With few training samples some have none.
                pieces = [piece for piece in pieces if piece.has("helpful")]
                seen = KeptScores.of_shards(pieces, top)
                if pieces[0].has("scores"):
                    for _ in _written(writer, *ids, 0, _shard_scores(pieces, block)):
                        pass
            else:
                taken = blocks() if phis else _written(writer, *ids, 0, blocks())
                seen = KeptScores.of(taken, improves, labels, top)
            train |= seen.by_sample
            for key, table in (("targets", targets), ("train", train)):
                if key == "targets" and mean_of is not None:
                    own = pd.DataFrame({MEAN_OF: [mean_of]})
                else:
                    name = str(spec.experiment) if key == "targets" else POOL if pool else TRAIN
                    file = question if key == "targets" else pool
                    own = _own_columns(study_file, file, name, table["id"])
                writer.table(key, _with_own(table, own), ["id"])
            # Not `sign`: queries are numexpr's, to which that is a function, and find nothing.
            searchable = ["target_id", "rank", "train_id", "score"]
            writer.table("top_influences", influence_table(seen, train, targets), searchable)


def _written(
    writer: Writer,
    train_ids: np.ndarray,
    target_ids: np.ndarray,
    first: int,
    blocks: Iterable[tuple[int, np.ndarray]],
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield blocks of scores that have been written; the file's first row is ``first``."""
    values = writer.matrix("scores", train_ids, target_ids, chunks=(1024, 64))
    for start, block in blocks:
        values[start - first : start - first + len(block)] = block
        yield start, block

"""Make one target of an experiment's: the mean of all, or that less the mean of another's."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EXACT_SCORES,
    check_made_for,
    check_same,
    create,
    open_artifact,
)
from trak_core.provenance import content_digest
from trak_core.spec import EXACT, ScoresSpec
from trak_core.system.progress import blocks_with_progress, software

_PER_SAMPLE = ("labels", "outputs", "predictions")


def average_targets(
    *, scores: Path, members: Sequence[Path], spec: ScoresSpec, code: str, memory_mb: int
) -> None:
    """Average one checkpoint's scores over the targets of an experiment; subtract those of another.

    A_c is linear in the targets' gradients, and all else in a score comes from training samples. So
    the one column is that of a target with the mean model output. ``members`` are the checkpoint's
    scores of the experiment, and of the one that is subtracted, if there is one. Where solved
    targets alone were kept, these are averaged. The target's id is the name of the experiment that
    it makes, its model output is the mean; so are its label and prediction, where these are no
    whole numbers, else -1.

    Source: docs/explanation/scores.md, "Scores of several targets".
    """
    kind = EXACT_SCORES if spec.features.projection.get("kind") == EXACT else CHECKPOINT_SCORES
    with ExitStack() as stack:
        parts = [stack.enter_context(open_artifact(path, kind)) for path in members]
        first, name = parts[0], str(spec.experiment)
        asked = [(part.spec["experiment"], part.spec["targets_digest"]) for part in parts]
        digests = spec.targets_digest, content_digest("mean", *asked)
        check_same("targets to average", *digests, parts[-1].path, kind.rule)
        for part, (experiment, digest) in zip(parts, asked, strict=True):
            own = replace(spec, experiment=experiment, targets_digest=digest)
            check_made_for(part, own, kind.rule)
            # Made from the same training samples' features, or Gramian.
            for key in ("checkpoint", "projection", "train_features", "train_gramian"):
                values = first.spec.get(key), part.spec.get(key)
                check_same(key.replace("_", " "), *values, part.path, kind.rule)

        def mean(key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
            """Return what one experiment's targets have in the mean, less what another's have."""
            means = [
                np.atleast_2d(part.vector(key, start, stop)).mean(axis=1, dtype=np.float64)
                for part in parts
            ]
            return means[0] - means[1] if len(means) > 1 else means[0]

        key = "similarities" if first.has("similarities") else "solved_targets"
        block = memory_mb * 2**20 // (16 * max(part.matrix(key).shape[1] for part in parts))
        file_spec = first.spec | {"experiment": name, "targets_digest": spec.targets_digest}
        provenance = software(code, "cpu", "numpy", made_from=[part.provenance for part in parts])
        with create(scores, kind, file_spec, provenance) as writer:
            rows = first.matrix(key)
            ids = first.vector(f"{key}/axis1")
            values = writer.matrix(key, ids, [name], dtype=rows.dtype)
            for start, stop in blocks_with_progress(len(rows), max(1, block), "rows"):
                values[start:stop] = mean(f"{key}/block0_values", start, stop)[:, None]
            writer.vector("train_ids", first.vector("train_ids"))
            for column in ("loss_weights", *(f"train_{column}" for column in _PER_SAMPLE)):
                writer.vector(column, first.vector(column))
            if spec.norm_power is not None:
                writer.scalar("train_norm", first.scalar("train_norm"))
            writer.vector("target_ids", [name])
            for column in (f"target_{column}" for column in _PER_SAMPLE):
                own = first.vector(column)
                number = mean(column) if own.dtype.kind == "f" else np.array([-1])
                writer.vector(column, number.astype(own.dtype))

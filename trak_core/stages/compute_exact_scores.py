"""Compute exact scores of an experiment under one checkpoint, without a projection."""

from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    EXACT_SCORES,
    GRAMIAN,
    check_same,
    check_splits,
    create,
    open_artifact,
)
from trak_core.config.memory_needs import exact_need
from trak_core.scoring.scores import powered
from trak_core.scoring.solve import DampedGramian, divide_by_lengths
from trak_core.spec import ScoresSpec
from trak_core.stages._inputs import normal_weights, write_samples
from trak_core.system.progress import software


def compute_exact_scores(
    *,
    scores: Path,
    train_path: Path,
    targets_path: Path,
    spec: ScoresSpec,
    code: str,
    memory_mb: int,
) -> None:
    """Solve the n x n Gramian for the targets.

    Writes A_c = (K_c W_c + ridge_c I)^-1 K_c,t, ridge_c = damping * mean_i w_i K_c[i, i]: what
    the scores of a projection converge to as its dimensions grow, in the same kind of file. With
    ``spec.normalize`` the training samples' gradients have length 1 in both. The paths are the
    checkpoint's Gramian of the training samples, and that between them and the targets. A damped
    Gramian that is singular is refused.
    """
    with (
        open_artifact(train_path, GRAMIAN) as train_file,
        open_artifact(targets_path, GRAMIAN) as target_file,
    ):
        shared = check_splits(train_file, target_file, spec, GRAMIAN)
        train_ids, target_ids = target_file.index("gramian"), target_file.columns("gramian")
        check_same(
            "training samples", train_file.index("gramian"), train_ids, targets_path, GRAMIAN.rule
        )
        exact_need(len(train_ids), len(target_ids)).check(memory_mb)
        weights = normal_weights(train_file, spec.curvature_power)
        gramian, cross = train_file.matrix("gramian")[:], target_file.matrix("gramian")[:]
        if spec.normalize:
            divide_by_lengths(gramian, cross)
        print(f"Solving {len(train_ids)} x {len(train_ids)} for {len(target_ids)} targets")
        damped = DampedGramian.factorize(gramian, weights, spec.damping)
        similarities = damped.similarities(cross)
        norm = None
        if spec.norm_power is not None:
            norm = damped.train_norm(powered(train_file.vector("loss_weights"), spec.norm_power))
        file_spec = {
            **spec.as_dict(),
            **shared,
            "lambda": damped.ridge,
            "train_gramian": train_file.content_hash,
        }
        made_from = [train_file.provenance, target_file.provenance]
        provenance = software(code, "cpu", "numpy", "scipy", made_from=made_from)
        with create(scores, EXACT_SCORES, file_spec, provenance) as writer:
            values = writer.matrix("similarities", train_ids, target_ids, chunks=(1024, 64))
            values[:] = similarities.astype(np.float32)
            write_samples(writer, train_file, target_file, norm)

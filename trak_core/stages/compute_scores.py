"""Score training samples by features and their normal matrix, or exactly; by self-influence too."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EXACT_SCORES,
    FEATURES,
    GRAMIAN,
    NORMAL_MATRIX,
    SELF_INFLUENCE,
    check_made_for,
    check_same,
    check_splits,
    checkpoint_scores_kind,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.fitted_checkpoint import (
    DampedGradients,
    DampedNormalMatrix,
    read_rows,
    self_influences,
    similarity_rows,
    write_normal_matrix,
)
from trak_core.config.memory_needs import exact_need, scores_need
from trak_core.dependency_digests import content_digest
from trak_core.spec import NormalSpec, ScoresSpec
from trak_core.stages._shared import PER_SAMPLE, write_samples
from trak_core.system.progress import blocks_with_progress


def compute_normal_matrix(
    *, normal_matrix: Path, features: Path, spec: NormalSpec, code: str, memory_mb: int
) -> None:
    """Write the normal matrix of training features, by ``write_normal_matrix``."""
    with open_artifact(features, FEATURES) as train:
        write_normal_matrix(normal_matrix, train, spec, code=code, memory_mb=memory_mb)


def compute_scores(
    *,
    scores: Path,
    train_path: Path,
    targets_path: Path,
    normal_matrix: Path,
    spec: ScoresSpec,
    keep: str,
    pool: Path | None = None,
    code: str,
    memory_mb: int,
) -> None:
    """Solve for the targets, then stream the training features once.

    Writes A_c = Phi_c (Phi_c^T W_c Phi_c + ridge_c I)^-1 T_c^T, ridge_c = damping * mean_i w_i
    |phi_i|^2, and what the average over checkpoints needs of this one. With ``spec.normalize``
    every phi_i is divided by its length. With ``keep="top_k"`` only the solved targets are kept,
    and the average streams Phi_c again: n x m is never stored; the other choice is ``full``. A
    damped matrix that is singular is refused.

    A file of features of a ``pool``, samples on which nothing was trained, takes the place of the
    training samples' in A_c; the matrix stays theirs. Only solved targets are kept then.
    """
    with ExitStack() as stack:
        train_file = stack.enter_context(open_artifact(train_path, FEATURES))
        target_file = stack.enter_context(open_artifact(targets_path, FEATURES))
        matrix_file = stack.enter_context(open_artifact(normal_matrix, NORMAL_MATRIX))
        shared = check_splits(train_file, target_file, spec)
        scored = train_file
        if pool is not None:
            scored = stack.enter_context(open_artifact(pool, FEATURES))
            check_made_for(scored, spec.of_pool())
            own = {key: scored.spec.get(key) for key in shared}
            check_same("specification of both splits", shared, own, scored)
        n_samples, proj_dim = scored.matrix("features").shape
        sample_ids, target_ids = (file.vector("sample_ids") for file in (scored, target_file))
        block = scores_need(proj_dim, len(target_ids)).rows(memory_mb)
        damped = DampedNormalMatrix.read(matrix_file, train_file, spec)
        solved = damped.solve(target_file.matrix("features")[:])
        file_spec = {
            **spec.as_dict(),
            **shared,
            "lambda": damped.damped.ridge,
            "train_features": scored.content_hash,
        }
        made_from = [train_file.provenance, target_file.provenance]
        provenance = software(code, "cpu", "numpy", "scipy", made_from=made_from)
        with create(scores, CHECKPOINT_SCORES, file_spec, provenance) as writer:
            if keep == "full":
                values = writer.matrix("similarities", sample_ids, target_ids, chunks=(1024, 64))
                phi = read_rows(scored.matrix("features"), normalize=spec.normalize)
                rows = similarity_rows(phi, solved)
                for start, stop in blocks_with_progress(n_samples, block, "training samples"):
                    values[start:stop] = rows(start, stop)
            else:
                names = range(proj_dim), target_ids
                writer.matrix("solved_targets", *names, dtype=np.float64)[:] = solved
            write_samples(writer, scored, target_file, damped.norm)


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
        shared = check_splits(train_file, target_file, spec)
        train_ids, target_ids = target_file.index("gramian"), target_file.columns("gramian")
        check_same("training samples", train_file.index("gramian"), train_ids, target_file)
        exact_need(len(train_ids), len(target_ids)).check(memory_mb)
        print(f"Solving {len(train_ids)} x {len(train_ids)} for {len(target_ids)} targets")
        gradients = DampedGradients.read(train_file, spec)
        similarities = gradients.similarities(target_file.matrix("gramian")[:])
        file_spec = {
            **spec.as_dict(),
            **shared,
            "lambda": gradients.damped.ridge,
            "train_gramian": train_file.content_hash,
        }
        made_from = [train_file.provenance, target_file.provenance]
        provenance = software(code, "cpu", "numpy", "scipy", made_from=made_from)
        with create(scores, EXACT_SCORES, file_spec, provenance) as writer:
            values = writer.matrix("similarities", train_ids, target_ids, chunks=(1024, 64))
            values[:] = similarities.astype(np.float32)
            write_samples(writer, train_file, target_file, gradients.norm)


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
    kind = checkpoint_scores_kind(spec.features.projection)
    with ExitStack() as stack:
        parts = [stack.enter_context(open_artifact(path, kind)) for path in members]
        first, name = parts[0], str(spec.experiment)
        asked = [(part.spec["experiment"], part.spec["targets_digest"]) for part in parts]
        own_digest = content_digest("mean", *asked)
        check_same("targets to average", spec.targets_digest, own_digest, parts[-1])
        for part, (experiment, digest) in zip(parts, asked, strict=True):
            own = replace(spec, experiment=experiment, targets_digest=digest)
            check_made_for(part, own)
            # Made from the same training samples' features, or Gramian.
            for key in ("checkpoint", "projection", "train_features", "train_gramian"):
                check_same(key.replace("_", " "), first.spec.get(key), part.spec.get(key), part)

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
            for column in ("loss_weights", *(f"train_{column}" for column in PER_SAMPLE)):
                writer.vector(column, first.vector(column))
            if spec.norm_power is not None:
                writer.scalar("train_norm", first.scalar("train_norm"))
            writer.vector("target_ids", [name])
            for column in (f"target_{column}" for column in PER_SAMPLE):
                own = first.vector(column)
                number = mean(column) if own.dtype.kind == "f" else np.array([-1])
                writer.vector(column, number.astype(own.dtype))


def compute_self_influence(
    *,
    self_influence: Path,
    features: Sequence[Path],
    normal_matrices: Sequence[Path],
    spec: ScoresSpec,
    code: str,
    memory_mb: int,
) -> None:
    """Write what ``self_influences`` gives, as a table."""
    import pandas as pd  # scoring needs none

    columns, file_spec = self_influences(features, normal_matrices, spec, memory_mb)
    provenance = software(code, "cpu", "numpy", "scipy", "pandas")
    with create(self_influence, SELF_INFLUENCE, file_spec, provenance) as writer:
        writer.table("train", pd.DataFrame(columns), ["id", "self_influence"])

"""Compute the scores of one checkpoint from features or from a Gramian."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EXACT_SCORES,
    FEATURES,
    GRAMIAN,
    NORMAL_MATRIX,
    SELF_INFLUENCE,
    Artifact,
    Writer,
    check_same,
    check_splits,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.fitted_checkpoint import (
    DampedGradients,
    read_normal_matrix,
    read_rows,
    self_influences,
    similarity_rows,
    stored_products,
    write_normal_matrix,
)
from trak_core.config.memory_needs import exact_need, scores_need
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import NormalSpec, ScoresSpec
from trak_core.stages._shared import PER_SAMPLE, open_made_for


def compute_normal_matrix(
    *, normal_matrix: Path, features: Path, spec: NormalSpec, code: str, memory_mb: int
) -> None:
    """Write the normal matrix of a checkpoint's features, as ``write_normal_matrix`` defines it."""
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
    """Write the similarities A_c = Phi_c (Phi_c^T W_c Phi_c + ridge_c I)^-1 T_c^T of checkpoint c.

    The rows of Phi_c are the training features phi_i, the rows of T_c are the target features, and
    W_c is the diagonal matrix of the weights w_i. ridge_c is damping * mean_i w_i |phi_i|^2. With
    ``spec.normalize``, each phi_i is divided by its norm. An ``InputError`` is raised if the matrix
    to invert is singular.

    With ``keep="full"``, the whole product A_c is written. With ``keep="top_k"``, the first factor
    Phi_c is left out to save space, and ``average_scores`` multiplies by it later.

    ``pool`` is a file with features of samples on which the models were not trained. If it is
    given, the first factor contains these features, and ``keep`` must be ``top_k``.
    """
    with ExitStack() as stack:
        train_file = stack.enter_context(open_artifact(train_path, FEATURES))
        target_file = stack.enter_context(open_artifact(targets_path, FEATURES))
        matrix_file = stack.enter_context(open_artifact(normal_matrix, NORMAL_MATRIX))
        shared = check_splits(train_file, target_file, spec)
        scored = train_file
        if pool is not None:
            scored = stack.enter_context(open_made_for(pool, FEATURES, spec.of_pool()))
            in_pool = {key: scored.spec.get(key) for key in shared}
            check_same("settings of the gradients", shared, in_pool, scored)
        n_samples, proj_dim = scored.matrix("features").shape
        sample_ids, target_ids = (file.vector("sample_ids") for file in (scored, target_file))
        block = scores_need(proj_dim, len(target_ids)).rows(memory_mb)
        damped, norm = read_normal_matrix(matrix_file, train_file, spec)
        solved = damped.solve(target_file.matrix("features")[:].astype(np.float64).T)
        file_spec = spec.as_dict() | shared | {"lambda": damped.ridge}
        file_spec |= {"train_features": scored.content_hash}
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
            _write_samples(writer, scored, target_file, norm)


def compute_exact_scores(
    *,
    scores: Path,
    train_path: Path,
    targets_path: Path,
    spec: ScoresSpec,
    code: str,
    memory_mb: int,
) -> None:
    """Write the exact similarities A_c = (K_c W_c + ridge_c I)^-1 K_c,t of checkpoint c.

    The file ``train_path`` contains the matrix K_c of the inner products of training gradients. The
    file ``targets_path`` contains the matrix K_c,t of the inner products of training and target
    gradients. With ``label_draws``, both matrices have additional rows, which ``DampedGradients``
    documents. W_c is the diagonal matrix of the weights w_i, and ridge_c is
    damping * mean_i w_i K_c[i, i].

    Similarities from projected gradients converge to A_c as ``proj_dim`` grows. With
    ``spec.normalize``, each training gradient in K_c and K_c,t is divided by its norm. An
    ``InputError`` is raised if the matrix to invert is singular.
    """
    with (
        open_artifact(train_path, GRAMIAN) as train_file,
        open_artifact(targets_path, GRAMIAN) as target_file,
    ):
        shared = check_splits(train_file, target_file, spec)
        train_ids, target_ids = target_file.index("gramian"), target_file.columns("gramian")
        check_same("training samples", train_file.index("gramian"), train_ids, target_file)
        n_rows = len(train_ids) * (1 + spec.features.label_draws)
        exact_need(n_rows, len(target_ids)).check(memory_mb)
        print(f"Solving a {n_rows} x {n_rows} system for {len(target_ids)} targets")
        gradients = DampedGradients.read(train_file, spec)
        similarities = gradients.similarities(stored_products(target_file))
        file_spec = spec.as_dict() | shared | {"lambda": gradients.damped.ridge}
        file_spec |= {"train_gramian": train_file.content_hash}
        made_from = [train_file.provenance, target_file.provenance]
        provenance = software(code, "cpu", "numpy", "scipy", made_from=made_from)
        with create(scores, EXACT_SCORES, file_spec, provenance) as writer:
            values = writer.matrix("similarities", train_ids, target_ids, chunks=(1024, 64))
            values[:] = similarities.astype(np.float32)
            _write_samples(writer, train_file, target_file, gradients.norm)


def _write_samples(writer: Writer, train: Artifact, targets: Artifact, norm: float | None) -> None:
    """Write the ids, labels, model outputs, predictions and loss weights of samples, and ``norm``.

    The scores of the checkpoint are divided by ``norm``, unless it is None.
    """
    writer.vector("loss_weights", train.vector("loss_weights"))
    if norm is not None:
        writer.scalar("train_norm", norm)
    for prefix, file in (("train", train), ("target", targets)):
        writer.vector(f"{prefix}_ids", file.vector("sample_ids"))
        for key in PER_SAMPLE:
            writer.vector(f"{prefix}_{key}", file.vector(key))


def compute_self_influence(
    *,
    self_influence: Path,
    features: Sequence[Path],
    normal_matrices: Sequence[Path],
    spec: ScoresSpec,
    code: str,
    memory_mb: int,
) -> None:
    """Write a table with the self-influence of each training sample (see ``self_influences``)."""
    import pandas as pd  # The other stages in this module do not need pandas.

    columns, file_spec = self_influences(features, normal_matrices, spec, memory_mb)
    provenance = software(code, "cpu", "numpy", "scipy", "pandas")
    with create(self_influence, SELF_INFLUENCE, file_spec, provenance) as writer:
        writer.table("train", pd.DataFrame(columns), ["id", "self_influence"])

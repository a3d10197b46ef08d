"""Sum the normal matrix of one checkpoint's training features."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import Artifact, check_same, create, open_artifact
from trak_core.linalg import extreme_eigenvalues, normal_matrix
from trak_core.progress import blocks_with_progress
from trak_core.spec import Weighting
from trak_core.stages.software import software


def rows_of(memory_mb: int, row_bytes: int) -> int:
    """Return how many rows of this size fit half of a job's memory budget, at least one."""
    return max(1, memory_mb * 2**20 // 2 // row_bytes)


def check_made_for(artifact: Artifact, expected: dict[str, Any], rule: str) -> None:
    """Refuse features that were made for another config than today's.

    An orphaned job may leave a complete file that Snakemake knows nothing about; only the file
    itself says what it is.

    Args:
        artifact: The open features.
        expected: From the config: projection (kind, proj_dim, seed), dtype, model_output, study,
            checkpoint (id), split.
        rule: The rule that makes such files.
    """
    spec = artifact.spec
    projection = {key: spec["projection"][key] for key in expected["projection"]}
    found = {
        "projection": projection,
        "checkpoint": spec["checkpoint"]["id"],
        **{key: spec[key] for key in ("dtype", "model_output", "study", "split")},
    }
    wanted = {key: expected[key] for key in found}
    check_same("settings of today's config", wanted, found, artifact.path, rule)


def compute_normal_matrix(
    *,
    normal_matrix_file: Path,
    features: Path,
    expected: dict[str, Any],
    weighting: str,
    code: str,
    memory_mb: int,
) -> None:
    """Stream the training features once and keep N, its mean squared norm and its spectrum's ends.

    Args:
        normal_matrix_file: The file to write.
        features: The checkpoint's training features.
        expected: See ``check_made_for``.
        weighting: ``plain`` or ``curvature``.
        code: The stage's code digest.
        memory_mb: Budget for blocks of rows; changes nothing but rounding.
    """
    kind = Weighting(weighting)
    with open_artifact(features, "trak-features") as train:
        check_made_for(train, expected, "compute_features")
        values = train.matrix("features")
        n_rows, proj_dim = values.shape
        weights = train.vector("curvature") if kind is Weighting.CURVATURE else np.ones(n_rows)
        # A row is read, made float64 and transposed.
        block = rows_of(memory_mb, 24 * proj_dim)

        def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for start, stop in blocks_with_progress(n_rows, block, "samples"):
                yield values[start:stop], weights[start:stop]

        matrix, mean_squared_norm, n_train = normal_matrix(blocks())
        spec = {**train.spec, "weighting": str(kind), "features": train.content_hash}
    smallest, largest = extreme_eigenvalues(matrix)
    with create(
        normal_matrix_file, "trak-normal-matrix", spec, software(code, "cpu", "numpy", "scipy")
    ) as writer:
        names = range(proj_dim)
        writer.matrix("normal_matrix", names, names, dtype=np.float64)[:] = matrix
        writer.scalar("mean_squared_norm", mean_squared_norm)
        writer.scalar("n_train", n_train)
        writer.scalar("smallest_eigenvalue", smallest)
        writer.scalar("largest_eigenvalue", largest)
        writer.scalar("condition_number", largest / max(smallest, np.finfo(float).tiny))

"""Sum the normal matrix of one checkpoint's training features."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trak_core.artifacts import FEATURES, NORMAL_MATRIX, check_made_for, create, open_artifact
from trak_core.config.budget import normal_matrix_need
from trak_core.scoring import solve
from trak_core.spec import FeaturesSpec
from trak_core.stages._splits import normal_weights
from trak_core.system.progress import blocks_with_progress
from trak_core.system.software import software


def compute_normal_matrix(
    *,
    normal_matrix: Path,
    features: Path,
    spec: FeaturesSpec,
    weighting: str,
    code: str,
    memory_mb: int,
) -> None:
    """Stream the training features once and keep N, its mean squared norm and its spectrum's ends.

    Args:
        normal_matrix: The file to write.
        features: The checkpoint's training features.
        spec: What the features must be.
        weighting: ``plain`` or ``curvature``.
        code: The stage's code digest.
        memory_mb: Budget for arrays; changes nothing but rounding.

    Raises:
        InputError: If the features are not what they must be, or exceed the budget.
    """
    with open_artifact(features, FEATURES) as train:
        check_made_for(train, spec, FEATURES.rule)
        values = train.matrix("features")
        n_rows, proj_dim = values.shape
        weights = normal_weights(train, weighting)
        block = normal_matrix_need(proj_dim).rows(memory_mb)

        def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for start, stop in blocks_with_progress(n_rows, block, "samples"):
                yield values[start:stop], weights[start:stop]

        matrix, mean_squared_norm, n_train = solve.normal_matrix(blocks())
        file_spec = {**train.spec, "weighting": weighting, "features": train.content_hash}
    smallest, largest = solve.extreme_eigenvalues(matrix)
    with create(
        normal_matrix,
        NORMAL_MATRIX,
        file_spec,
        software(code, "cpu", "numpy", "scipy"),
        weighting=weighting,
    ) as writer:
        names = range(proj_dim)
        writer.matrix("normal_matrix", names, names, dtype=np.float64)[:] = matrix
        writer.scalar("mean_squared_norm", mean_squared_norm)
        writer.scalar("n_train", n_train)
        writer.scalar("smallest_eigenvalue", smallest)
        writer.scalar("largest_eigenvalue", largest)
        # At most what float64 can tell: an exactly singular matrix has one as well.
        floor = largest * np.finfo(np.float64).eps
        writer.scalar("condition_number", largest / max(smallest, floor) if largest > 0 else 1.0)

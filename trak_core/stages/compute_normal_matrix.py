"""Sum the normal matrix of one checkpoint's training features."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    FEATURES,
    NORMAL_MATRIX,
    check_made_for,
    create,
    open_artifact,
    software,
)
from trak_core.config.memory_needs import normal_matrix_need
from trak_core.scoring.scores import powered
from trak_core.scoring.solve import (
    Spectrum,
    extreme_eigenvalues,
    mean_squared_norm,
    weighted_gramians,
)
from trak_core.spec import NormalSpec
from trak_core.stages._shared import normal_weights, read_rows
from trak_core.system.progress import blocks_with_progress


def compute_normal_matrix(
    *, normal_matrix: Path, features: Path, spec: NormalSpec, code: str, memory_mb: int
) -> None:
    """Stream the training features once and keep N, its mean squared norm and its spectrum's ends.

    With ``norm_power`` also its eigenvalues, and the k x k products that ||B|| of any damping comes
    from: no other stage needs all training features again for it.
    """
    with open_artifact(features, FEATURES) as train:
        check_made_for(train, spec.features)
        values = train.matrix("features")
        n_rows, proj_dim = values.shape
        rows = read_rows(values, normalize=spec.normalize)
        weights = [normal_weights(train, spec.curvature_power)]
        if spec.norm_power is not None:
            weights.append(powered(train.vector("loss_weights"), spec.norm_power) ** 2)
            if (weights[0] != 1).any():
                weights.append(np.ones(n_rows))
        block = normal_matrix_need(proj_dim, divides=spec.norm_power is not None).rows(memory_mb)

        def blocks() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
            for start, stop in blocks_with_progress(n_rows, block, "samples"):
                yield rows(start, stop), [own[start:stop] for own in weights]

        matrix, *others = weighted_gramians(blocks())
        own = {key: value for key, value in spec.as_dict().items() if key not in train.spec}
        file_spec = {**train.spec, **own, "features": train.content_hash}
    provenance, way = software(code, "cpu", "numpy", "scipy"), spec.weighting
    with create(normal_matrix, NORMAL_MATRIX, file_spec, provenance, weighting=way) as writer:
        names = range(proj_dim)
        writer.matrix("normal_matrix", names, names, dtype=np.float64)[:] = matrix
        writer.scalar("mean_squared_norm", mean_squared_norm(matrix, n_rows))
        writer.scalar("n_train", n_rows)
        if others:
            spectrum = Spectrum.decompose(matrix)
            smallest, largest = spectrum.eigenvalues[[0, -1]].tolist()
            writer.vector("eigenvalues", spectrum.eigenvalues)
            # Where all rows weigh 1 Phi^T Phi is N itself.
            products = spectrum.norm_products(others[0], others[-1] if len(others) > 1 else matrix)
            writer.matrix("norm_products", names, names, dtype=np.float64)[:] = products
        else:
            smallest, largest = extreme_eigenvalues(matrix)
        writer.scalar("smallest_eigenvalue", smallest)
        writer.scalar("largest_eigenvalue", largest)
        # At most what float64 can tell: an exactly singular matrix has one as well.
        floor = largest * np.finfo(np.float64).eps
        writer.scalar("condition_number", largest / max(smallest, floor) if largest > 0 else 1.0)

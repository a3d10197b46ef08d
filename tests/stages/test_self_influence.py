"""Self-influence: the stage against dense matrices."""

import numpy as np
import pandas as pd
import pytest
from pipeline import changed
from small_run import influences_spec, loss_weights, stored

from trak_core.stages.compute_scores import compute_self_influence

JOB = {"code": "code", "memory_mb": 300}


def self_influence_oracle(features, weights, power, *, normalize):
    """mean_c(A_c[i, i]) * mean_c(Q_c^power), dense; with the power .75 by curvature and norm."""
    diagonals, products = [], []
    for phi, q in zip(features, weights, strict=True):
        own = phi = phi.astype(float)
        if normalize:
            phi = phi / np.sqrt((phi**2).sum(1))[:, None]
        w = (q * (1 - q)) ** power if power == 0.75 else np.ones_like(q)
        matrix = phi.T @ (w[:, None] * phi)
        matrix += 2 * np.mean(w * (phi**2).sum(1)) * np.eye(phi.shape[1])
        pairs = phi @ np.linalg.inv(matrix) @ phi.T
        # A training sample that is its own target: the target's features are not normalized.
        diagonal = np.diagonal(phi @ np.linalg.inv(matrix) @ own.T)
        diagonals.append(diagonal)
        products.append(diagonal * q**power)
        products[-1] /= np.linalg.norm(q[:, None] ** power * pairs)
    if power == 0.75:
        return np.mean(products, axis=0)
    return np.mean(diagonals, axis=0) * np.mean(np.array(weights) ** power, axis=0)


UNIT = {"combine": "unit_average", "weighting": "curvature", "power": 0.75}


@pytest.mark.parametrize(
    "settings", [{}, UNIT, UNIT | {"normalize": True}], ids=["ends", "along", "normalized"]
)
def test_self_influence_is_the_diagonal(run, tmp_path, settings):
    path, power = tmp_path / "self.h5", settings.get("power", 0.5)
    matrices = run.matrices()
    spec = influences_spec(run)
    if settings:
        run.stages(tmp_path / "run", **settings)
        matrices = [tmp_path / f"run/normal_matrix/{c}.h5" for c in run.checkpoints]
        powers = {f"{key}_power": power for key in ("curvature", "norm", "loss_weight")}
        others = {key: value for key, value in settings.items() if key != "power"}
        spec = changed(spec, **powers, **others)
    inputs = {"features": run.features("train"), "normal_matrices": matrices}
    compute_self_influence(self_influence=path, **inputs, spec=spec, **JOB)
    table = pd.read_hdf(path, "train")
    expected = self_influence_oracle(
        stored(run, "features"), loss_weights(run), power, normalize=spec.normalize
    )
    # Curvatures are stored in float32.
    bound = 1e-5 if settings else 1e-9
    assert np.abs(table["self_influence"] - expected).max() < bound * expected.max()
    assert table["id"].tolist() == run.train.ids

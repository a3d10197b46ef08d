"""Self-influence and flipped labels: the stages against dense matrices."""

import numpy as np
import pandas as pd
import pytest
from pipeline import ON_CPU, changed
from small_run import STUDY, influences_spec, loss_weights, stored

from trak_core.artifacts import ArtifactError
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_scores import compute_normal_matrix, compute_self_influence
from trak_core.stages.evaluate_scores import find_flipped
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.retraining_draws import flipped_labels

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
        # Each is its own target, whose features stay as they are.
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


def test_flipped_labels_are_trained_on_and_found(run, tmp_path):
    """More flipped labels, and longer training, than this little net could learn by heart."""
    flips = {"fraction": 0.1, "seed": 2}
    labels = np.array([int(label) for _, label in run.train.samples])
    training = {"study_file": STUDY, "times": None, "threads": 1, "flipped": flips}
    features, matrices = [], []
    for seed, checkpoint in enumerate(run.checkpoints):
        path = tmp_path / f"{checkpoint}.pt"
        train_checkpoint(checkpoints=[path], arguments={"steps": 60, "seed": seed}, **training)
        features.append(tmp_path / f"{checkpoint}-features.h5")
        matrices.append(tmp_path / f"{checkpoint}-matrix.h5")
        spec = influences_spec(run, flips).under(checkpoint)
        compute_features(
            features=features[-1], checkpoint=path, study_file=STUDY, spec=spec.of_train(), **ON_CPU
        )
        compute_normal_matrix(
            normal_matrix=matrices[-1], features=features[-1], spec=spec.of_normal_matrix(), **JOB
        )

    inputs = {"features": features, "normal_matrices": matrices}
    inputs["original"] = run.features("train")[0]

    def find(flips):
        spec = influences_spec(run, flips)
        find_flipped(flipped=tmp_path / "found.h5", **inputs, spec=spec, **JOB)

    find(flips)
    train = pd.read_hdf(tmp_path / "found.h5", "train")
    assert np.array_equal(train["label"], labels)
    assert np.array_equal(train["given_label"], flipped_labels(labels, **flips))
    assert np.array_equal(train["flipped"] == 1, train["label"] != train["given_label"])
    detection = pd.read_hdf(tmp_path / "found.h5", "detection").set_index("method")
    order = train.sort_values("self_influence", ascending=False)["flipped"]
    assert detection.loc["self_influence", "found"] == order.head(15).mean()
    assert detection.loc["self_influence", "auc"] > 0.7
    with pytest.raises(ArtifactError, match=r"Expected \{'flipped': \{'fraction': 0\.2"):
        find({**flips, "fraction": 0.2})

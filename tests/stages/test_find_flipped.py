"""Self-influence and flipped labels: the stages against dense matrices."""

import numpy as np
import pandas as pd
import pytest
from small_run import STUDY, influences_spec, loss_weights, stored

from trak_core.artifacts import ArtifactError
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_normal_matrix import compute_normal_matrix
from trak_core.stages.compute_self_influence import compute_self_influence
from trak_core.stages.find_flipped import find_flipped
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.draws import flipped_labels


def self_influence_oracle(features, weights):
    """mean_c(A_c[i, i]) * mean_c(Q_c^0.5), dense."""
    diagonals = []
    for phi in features:
        phi = phi.astype(float)
        matrix = phi.T @ phi + 2 * np.mean((phi**2).sum(1)) * np.eye(phi.shape[1])
        diagonals.append(np.einsum("ij,jk,ik->i", phi, np.linalg.inv(matrix), phi))
    return np.mean(diagonals, axis=0) * np.mean(np.sqrt(weights), axis=0)


def test_self_influence_is_the_diagonal(run, tmp_path):
    path = tmp_path / "self.h5"
    compute_self_influence(
        self_influence=path,
        features=run.features("train"),
        normal_matrices=run.matrices(),
        spec=influences_spec(run),
        code="code",
        memory_mb=300,
    )
    table = pd.read_hdf(path, "train")
    expected = self_influence_oracle(stored(run, "features"), loss_weights(run))
    assert np.abs(table["self_influence"] - expected).max() < 1e-9 * expected.max()
    assert table["id"].tolist() == run.train.ids


def test_flipped_labels_are_trained_on_and_found(run, tmp_path):
    """More flipped labels, and longer training, than this little net could learn by heart."""
    flips = {"fraction": 0.1, "seed": 2}
    labels = np.array([int(label) for _, label in run.train.samples])
    features, matrices = [], []
    for seed, checkpoint in enumerate(run.checkpoints):
        path = tmp_path / f"{checkpoint}.pt"
        train_checkpoint(
            checkpoints=[path],
            study_file=STUDY,
            arguments={"steps": 60, "seed": seed},
            times=None,
            threads=1,
            flipped=flips,
        )
        features.append(tmp_path / f"{checkpoint}-features.h5")
        matrices.append(tmp_path / f"{checkpoint}-matrix.h5")
        spec = influences_spec(run, flips).under(checkpoint)
        compute_features(
            features=features[-1],
            checkpoint=path,
            study_file=STUDY,
            spec=spec.of_train(),
            code="code",
            device="cpu",
            batch_size=64,
            memory_mb=300,
            threads=1,
        )
        compute_normal_matrix(
            normal_matrix=matrices[-1],
            features=features[-1],
            spec=spec.of_normal_matrix(),
            code="code",
            memory_mb=300,
        )

    def find(flips):
        find_flipped(
            flipped=tmp_path / "found.h5",
            features=features,
            normal_matrices=matrices,
            original=run.features("train")[0],
            spec=influences_spec(run, flips),
            code="code",
            memory_mb=300,
        )

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

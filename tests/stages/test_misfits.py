"""Whole artifacts that do not belong together, or are not what they say, are refused."""

import h5py
import numpy as np
import pytest
from linear_study import SPEC, with_two_checkpoints
from pipeline import averaged, run_stages

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    FEATURES,
    ArtifactError,
    check_made_for,
    create,
    open_artifact,
)
from trak_core.stages.join_shards import join_shards


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("misfits")
    study = with_two_checkpoints(folder)
    run_stages(folder, *study, model_output="regression", proj_dim=8, shards=2)
    run_stages(folder / "top", *study, model_output="regression", proj_dim=8, keep="top_k")
    return folder


def features_file(path, **changes):
    columns = {"outputs": np.float32([1, 2, 3]), "sample_ids": [1, 2, 3]}
    with create(path, FEATURES, {"a": 1}, {"b": 2}) as file:
        file.matrix("features", [1, 2, 3], [0, 1])[:] = 0
        for key, values in (columns | changes).items():
            file.vector(key, values)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": np.float32([1, 2])}, r"'outputs' must have one entry .* 3 'sample_ids'"),
        ({"sample_ids": [1, 2, 3, 4]}, r"'features/axis1' must have one entry .* 4 'sample_ids'"),
        ({"labels": np.zeros(3, complex)}, r"'labels' must have .* dtype complex128"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(tmp_path, changes, message):
    path = features_file(tmp_path / "a.h5", **changes)
    with pytest.raises(ArtifactError, match=message), open_artifact(path, FEATURES):
        pass


def test_a_file_of_another_program_that_takes_our_name(tmp_path):
    """Its hash is right, its specification is not one of ours."""
    path = features_file(tmp_path / "a.h5")
    with open_artifact(path, FEATURES) as file:
        expected = SPEC.under("c0").of_train()
        with pytest.raises(ArtifactError, match="settings of today's config"):
            check_made_for(file, expected, FEATURES.rule)
        with pytest.raises(ArtifactError, match=r"needs 'loss_weights'.*rule compute_features"):
            file.vector("loss_weights")


def test_solved_targets_in_place_of_scores_are_refused(results, tmp_path):
    paths = [results / "scores/mine/c0.h5", results / "top/scores/mine/c1.h5"]
    message = r"mine/c1\.h5: .*needs 'similarities/block0_values'.*rule compute_scores remakes it"
    with pytest.raises(ArtifactError, match=message):
        averaged(tmp_path / "out.h5", paths, SPEC)
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_other_labels_are_refused(results, tmp_path):
    """The study's data changed on disk between two checkpoints' jobs."""
    changed = tmp_path / "c1.h5"
    with (
        open_artifact(results / "scores/mine/c1.h5", CHECKPOINT_SCORES) as old,
        create(changed, CHECKPOINT_SCORES, old.spec, old.provenance) as new,
    ):
        key = "similarities"
        new.matrix(key, old.index(key), old.columns(key))[:] = old.matrix(key)[:]
        for name, node in old.file.items():
            if isinstance(node, h5py.Dataset):
                values = old.ids(name) if node.dtype.kind == "S" else old.vector(name)
                new.vector(name, values + 1 if name == "train_labels" else values)
    with pytest.raises(ArtifactError, match=r"c1\.h5: .* must agree in the train labels"):
        averaged(tmp_path / "out.h5", [results / "scores/mine/c0.h5", changed], SPEC)


def test_a_whole_split_in_place_of_a_shard_is_refused(results, tmp_path):
    shards = [results / "features/c0/train.h5", results / "features/c0/train-2.h5"]
    with pytest.raises(ArtifactError, match=r"train\.h5: .* must agree in the order of shards"):
        join_shards(features=tmp_path / "out.h5", shards=shards, code="code")

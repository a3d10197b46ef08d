"""Snakemake for real, with checkpoints of a user: what runs again, and what is refused."""

import os
import re
import shutil

import pytest
from own_checkpoints import OWN, save_own_checkpoint
from workspace import Workspace

ALL_FEATURES = 9  # three checkpoints x (train, two experiments)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    workspace = Workspace.make(tmp_path_factory.mktemp("base") / "o", "diabetes.py", OWN)
    for number in range(3):
        save_own_checkpoint(workspace, number)
    assert workspace.run() == {
        "compute_features": ALL_FEATURES,
        "compute_normal_matrix": 3,
        "compute_scores": 6,
        "average_scores": 2,
    }
    return workspace


@pytest.fixture
def own_study(own, tmp_path):
    return own.copy(tmp_path / "study")


def test_own_checkpoint_replaced_by_an_older_file(own_study):
    path = save_own_checkpoint(own_study, 1, scale=2)
    os.utime(path, (1e9, 1e9))
    assert own_study.run() == {
        "compute_features": 3,
        "compute_normal_matrix": 1,
        "compute_scores": 2,
        "average_scores": 2,
    }
    assert own_study.run() == {}


def test_own_checkpoint_touched(own_study):
    """Its time counts, since its content is never read to find out: its own jobs run again."""
    own_study.path("mine/c1.pt").touch()
    before = own_study.artifacts()
    assert own_study.run()["compute_features"] == 3
    assert own_study.artifacts() == before


def test_new_targets_need_no_training_data(own_study):
    """The training data are gone; the study file is as it was."""
    study = own_study.path("diabetes.py")
    assert "load_diabetes" in study.read_text()
    # Without touching the study: its loader now fails for anything but the last 100 rows.
    module = own_study.path("sitecustomize.py")
    module.write_text(
        "import torch.utils.data as data\n"
        "class TensorDataset(data.TensorDataset):\n"
        "    def __init__(self, *tensors):\n"
        "        assert len(tensors[0]) == 100, 'the training data are gone'\n"
        "        super().__init__(*tensors)\n"
        "data.TensorDataset = TensorDataset\n"
    )
    own_study.config["experiments"]["new"] = {"targets": ["patient-441"]}
    assert own_study.run() == {"compute_features": 3, "compute_scores": 3, "average_scores": 1}


def test_a_damaged_file_stops_the_job_and_names_itself(own_study):
    path = own_study.path("results/features/c1/train.h5")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    own_study.config["scoring"] = {"damping": 1}
    output = own_study.fail("--keep-going", "scores")
    assert "features/c1/train.h5" in output
    assert "rule compute_features remakes it" in output
    path.unlink()
    counts = own_study.run()
    assert counts["compute_features"] == 1


@pytest.mark.parametrize(
    ("change", "remade", "found"),
    [
        ({"projection": {"proj_dim": 16, "seed": 5}}, "compute_features", "'seed': 5"),
        ({"parameters": ["2.*"]}, "compute_features", r"'parameter_patterns': \['2\.\*'\]"),
        ({"experiments": {"one": {"targets": ["patient-441"]}}}, "compute_features", "targets_dig"),
        ({"experiments": {"one": {"targets": ["patient-441"]}}}, "compute_scores", "targets_dig"),
    ],
)
def test_files_of_other_settings_are_refused_though_snakemake_knows_nothing(
    own_study, change, remade, found
):
    """Without its own records Snakemake misses a changed config; the files themselves don't."""
    shutil.rmtree(own_study.path(".snakemake/metadata"))
    own_study.path("results/scores/one.h5").unlink()
    if remade == "compute_features":
        shutil.rmtree(own_study.path("results/scores/one"))
    own_study.config.update(change)
    output = own_study.fail("results/scores/one.h5")
    assert "settings of today's config" in output
    assert re.search(found, output)
    assert f"rule {remade} remakes it" in output

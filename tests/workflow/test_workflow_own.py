"""Checkpoints of a user's own: what changes run again, for real, and which files are refused."""

import os
import re
import shutil

import pytest
from own_checkpoints import save_own_checkpoint
from workspace import Workspace, scoring


@pytest.fixture
def own_study(own, tmp_path):
    return own.copy(tmp_path / "study")


def test_four_changes_at_once_end_where_a_fresh_start_does(own, own_study, tmp_path):
    """A checkpoint replaced by an older file, one removed; other targets, another damping.

    What other tests only let Snakemake plan is seen here for real.
    """
    os.utime(save_own_checkpoint(own_study, 1, scale=2), (1e9, 1e9))
    del own_study.config["checkpoints"]["c2"]
    own_study.config["experiments"]["one"] = {"targets": ["patient-351"]}
    own_study.config["scoring"] = {"damping": 1.5}
    planned = {**scoring(1, 2), "compute_features": 4, "compute_scores": 4}
    files = own_study.would_write()
    assert own_study.would_run() == planned
    assert own_study.run() == planned
    assert own_study.would_run() == {}

    before, after = own.artifacts(), own_study.artifacts()
    assert {name for name in before if before[name] != after[name]} == files
    assert files == {
        *("features/c1/train.h5", "features/c1/few.h5", "features/c0/one.h5", "features/c1/one.h5"),
        "normal_matrix/c1.h5",
        *(f"scores/{name}{part}.h5" for name in ("few", "one") for part in ("/c0", "/c1", "")),
    }
    # A removed checkpoint's files stay, and do no harm; the README says how to find them.
    assert "features/c2/train.h5" in after
    fresh = Workspace.make(tmp_path / "fresh", "diabetes.py", own_study.config)
    shutil.copytree(own_study.path("mine"), fresh.path("mine"))
    fresh.run()
    expected = fresh.artifacts()
    assert len(expected) == 14
    assert [name for name in expected if after[name] != expected[name]] == []


def test_own_checkpoint_touched(own_study):
    """Its time counts, since its content is never read to find out: its own jobs run again."""
    own_study.path("mine/c1.pt").touch()
    before = own_study.artifacts()
    assert own_study.would_run()["compute_features"] == 3
    assert own_study.run("results/features/c1/one.h5") == {"compute_features": 1}
    assert own_study.artifacts() == before


def test_new_targets_need_no_training_data(own_study, monkeypatch):
    """The training data are gone; the study file is as it was."""
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
    monkeypatch.setenv("PYTHONPATH", str(own_study.folder), prepend=os.pathsep)
    own_study.config["experiments"]["new"] = {"targets": ["patient-441"]}
    new = {"compute_features": 3, "compute_scores": 3, "average_scores": 1}
    assert own_study.would_run() == new
    own_study.config["checkpoints"] = {"c0": "mine/c0.pt"}
    new = {"compute_features": 1, "compute_scores": 1, "average_scores": 1}
    assert own_study.run("results/scores/new.h5") == new
    # It fails indeed for who needs them.
    own_study.config["projection"]["seed"] = 1
    assert "the training data are gone" in own_study.fail("results/features/c0/train.h5")


def test_a_damaged_file_stops_the_job_and_names_itself(own_study):
    path = own_study.path("results/features/c1/train.h5")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    own_study.config["scoring"] = {"damping": 1}
    output = own_study.fail("results/scores/one/c1.h5")
    assert "features/c1/train.h5" in output
    assert "rule compute_features remakes it" in output
    path.unlink()
    assert own_study.run("results/scores/one/c1.h5")["compute_features"] == 1


@pytest.mark.parametrize(
    ("change", "remade", "found"),
    [
        ({"projection": {"proj_dim": 16, "seed": 5}}, "compute_features", "'seed': 5"),
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

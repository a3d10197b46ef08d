"""Studies of a user's own: what changes run again, for real, and which files are refused."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from own_checkpoints import own_study, save_own_checkpoint
from pipeline import read_scores, run_exact_stages
from trained_cases import assert_close
from workspace import Workspace, scoring


@pytest.fixture
def study(own, tmp_path):
    return own.copy(tmp_path / "study")


def test_four_changes_at_once_end_where_a_fresh_start_does(own, study, tmp_path):
    """A checkpoint replaced by an older file, one removed; other targets, another damping.

    What other tests only let Snakemake plan is seen here for real.
    """
    os.utime(save_own_checkpoint(study, 1, scale=2), (1e9, 1e9))
    del study.config["checkpoints"]["c2"]
    study.config["experiments"]["one"] = {"targets": ["patient-351"]}
    study.config["scoring"] = {"damping": 1.5}
    planned = {**scoring(1, 2), "compute_features": 4, "compute_scores": 4}
    files = study.would_write()
    assert study.would_run() == planned
    assert study.run() == planned
    assert study.would_run() == {}

    before, after = own.artifacts(), study.artifacts()
    assert {name for name in before if before[name] != after[name]} == files
    assert files == {
        *("features/c1/train.h5", "features/c1/few.h5", "features/c0/one.h5", "features/c1/one.h5"),
        "normal_matrix/c1.h5",
        *(f"scores/{name}{part}.h5" for name in ("few", "one") for part in ("/c0", "/c1", "")),
    }
    # A removed checkpoint's files stay, and do no harm; reference/reruns.md says how to find them.
    assert "features/c2/train.h5" in after
    fresh = Workspace.make(tmp_path / "fresh", "diabetes.py", study.config)
    shutil.copytree(study.path("mine"), fresh.path("mine"))
    fresh.run()
    expected = fresh.artifacts()
    assert len(expected) == 14
    assert [name for name in expected if after[name] != expected[name]] == []


def test_an_edit_of_an_own_output_runs_again_what_it_decides(study):
    study.path("outputs.py").write_text("def f(returned, label):\n    return returned[0]\n")
    study.config["model_output"] = {"function": "outputs.py:f", "name": "the progress"}
    del study.config["experiments"]["one"]
    study.run("results/scores/few.h5", "results/answers/few.html")
    scores = read_scores(study.path("results/scores/few.h5"))
    assert "the progress" in study.path("results/answers/few.html").read_text()
    assert study.would_run() == {}
    study.config["model_output"] = {"function": "outputs.py:f", "name": "the progress in a year"}
    assert study.would_run() == {"average_scores": 1}
    study.path("outputs.py").write_text("def f(returned, label):\n    return 2 * returned[0]\n")
    assert study.run("results/scores/few.h5")["compute_features"] == 6
    again = read_scores(study.path("results/scores/few.h5"))
    # Both gradients twice as long, and so is the ridge: the same similarities of the same Q.
    np.testing.assert_allclose(again, scores, rtol=1e-4, atol=1e-6)


def test_from_exact_scores_to_a_projection(study, tmp_path):
    """What runs, what runs again; Snakemake's scores are those of the stages."""
    del study.config["checkpoints"]["c2"], study.config["experiments"]["one"]
    study.config["projection"] = "exact"
    everything = {"compute_gramian": 4, "compute_exact_scores": 2, "average_scores": 1}
    assert study.run() == everything
    study.config["compute"] = {"batch_size": 9, "memory_mb": 300, "threads": 2}
    assert study.would_run() == {}
    paths = {name: study.path(path) for name, path in study.config["checkpoints"].items()}
    targets = study.config["experiments"]["few"]["targets"]
    given = study.path("diabetes.py"), paths, targets
    expected = run_exact_stages(tmp_path / "exact", *given, model_output="regression")
    exact = read_scores(study.path("results/scores/few.h5")).to_numpy()
    assert_close(exact, read_scores(expected).to_numpy(), 1e-6)
    save_own_checkpoint(study, 1, scale=2)
    again = {"compute_gramian": 2, "compute_exact_scores": 1, "average_scores": 1}
    assert study.would_run() == again
    save_own_checkpoint(study, 1)
    assert study.would_run() == {}
    study.config["label_draws"] = 2
    assert study.would_run() == everything
    del study.config["label_draws"]
    study.config["scoring"] = {"damping": 1.5}
    assert study.would_run() == {"compute_exact_scores": 2, "average_scores": 1}
    study.config["projection"] = {"proj_dim": 2048}
    assert study.would_run() == scoring(2, 1)


def test_results_without_snakemakes_records_count_as_finished(study):
    """As the page on what runs again says: a new checkpoint's jobs run once averages are gone."""
    shutil.rmtree(study.path(".snakemake/metadata"))
    save_own_checkpoint(study, 3)
    study.config["checkpoints"]["c3"] = "mine/c3.pt"
    assert study.would_run() == {}
    for average in study.path("results/scores").glob("*.h5"):
        average.unlink()
    assert study.would_run() == scoring(1, 2)
    # Experiment by experiment, where all would take long to plan.
    assert study.would_run("scores", "--batch", "scores=1/2") == scoring(1, 1)


def test_files_of_other_settings_are_refused_though_snakemake_knows_nothing(study):
    """Without its own records Snakemake misses a changed config; the files themselves don't."""
    shutil.rmtree(study.path(".snakemake/metadata"))
    study.path("results/scores/one.h5").unlink()
    study.config["experiments"] = {"one": {"targets": ["patient-441"]}}
    output = study.fail("results/scores/one.h5")
    assert re.search(r"settings of the current config.*targets_dig", output, re.S)
    assert "rule compute_scores remakes it" in output


def test_paths_that_a_shell_would_run_and_a_results_folder_elsewhere(tmp_path):
    """By a real job: names with spaces and signs; results behind a symbolic link."""
    workspace = own_study(tmp_path / "a study", 1)
    name = "my own (c0); touch ran & touch ran | touch ran > ran #.pt"
    shutil.move(workspace.path("mine/c0.pt"), workspace.path(name))
    workspace.config["checkpoints"]["c0"] = name
    shutil.move(workspace.path("diabetes.py"), workspace.path("my study; touch ran.py"))
    workspace.config["study"] = "my study; touch ran.py"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    workspace.path("results").symlink_to(elsewhere)
    workspace.run("results/normal_matrix/c0.h5")
    assert (elsewhere / "features/c0/train.h5").is_file()
    assert (elsewhere / "normal_matrix/c0.h5").is_file()
    assert not [p for p in tmp_path.rglob("*") if p.name == "ran"]
    assert not Path("ran").exists()

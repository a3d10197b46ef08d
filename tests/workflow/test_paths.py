"""Paths that a shell would take for commands, and results that lie elsewhere."""

import shutil
from pathlib import Path

import torch
from own_checkpoints import network
from workspace import Workspace


def test_paths_that_a_shell_would_run_and_a_results_folder_elsewhere(tmp_path):
    """By a real job: names with spaces, quotes and commands; results behind a symbolic link."""
    settings = {
        "model_output": "regression",
        "checkpoints": {"c0": "my \"own\" 'c0' $(touch ran) `touch ran`; touch ran #.pt"},
        "experiments": {"mine": {"targets": ["patient-342"]}},
        "projection": {"proj_dim": 8},
    }
    workspace = Workspace.make(tmp_path / "a study", "diabetes.py", settings)
    torch.save(network().state_dict(), workspace.path(settings["checkpoints"]["c0"]))
    shutil.move(workspace.path("diabetes.py"), workspace.path("my study $(touch ran).py"))
    workspace.config["study"] = "my study $(touch ran).py"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    workspace.path("results").symlink_to(elsewhere)
    status, output = workspace.snakemake("results/normal_matrix/c0.h5")
    assert status == 0, output
    assert (elsewhere / "features/c0/train.h5").is_file()
    assert (elsewhere / "normal_matrix/c0.h5").is_file()
    assert not [p for p in tmp_path.rglob("*") if p.name == "ran"]
    assert not Path("ran").exists()

"""Exact scores under Snakemake: what runs, what runs again, and the way to a projection."""

import numpy as np
import torch
from pipeline import read_scores, run_exact_stages
from trained_cases import STUDIES, assert_close
from workspace import scoring


def test_the_workflow_from_exact_scores_to_a_projection(own, tmp_path):
    """What runs, what runs again; Snakemake's scores are those of the stages."""
    study = own.copy(tmp_path / "study")
    del study.config["checkpoints"]["c2"], study.config["experiments"]["one"]
    study.config["projection"] = "exact"
    assert study.run() == {"compute_gramian": 4, "compute_exact_scores": 2, "average_scores": 1}
    study.config["compute"] = {"batch_size": 9, "memory_mb": 300, "threads": 2}
    assert study.would_run() == {}
    checkpoint = study.path("mine/c1.pt")
    content = checkpoint.read_bytes()

    def change():
        torch.save({k: 1.1 * v for k, v in torch.load(checkpoint).items()}, checkpoint)

    change()
    again = {"compute_gramian": 2, "compute_exact_scores": 1, "average_scores": 1}
    assert study.would_run() == again
    checkpoint.write_bytes(content)
    assert study.would_run() == {}
    paths = {name: study.path(path) for name, path in study.config["checkpoints"].items()}
    targets = study.config["experiments"]["few"]["targets"]
    here = (STUDIES / "diabetes.py", paths, targets)
    expected = run_exact_stages(tmp_path / "exact", *here, model_output="regression")
    exact = read_scores(study.path("results/scores/few.h5")).to_numpy()
    assert_close(exact, read_scores(expected).to_numpy(), 1e-6)

    study.config["scoring"] = {"damping": 1.5}
    assert study.would_run() == {"compute_exact_scores": 2, "average_scores": 1}

    study.config["projection"] = {"proj_dim": 2048}
    assert study.would_run() == scoring(2, 1)

    study.config |= {"projection": "exact", "label_draws": 2}
    everything = {"compute_gramian": 4, "compute_exact_scores": 2, "average_scores": 1}
    assert study.run() == everything
    assert study.would_run() == {}
    drawn = read_scores(study.path("results/scores/few.h5")).to_numpy()
    assert 0.5 < np.corrcoef(drawn.ravel(), exact.ravel())[0, 1] < 0.9999
    del study.config["label_draws"]
    assert study.would_run() == everything

"""The distortion of a projection under Snakemake: what runs, and what runs again."""

import pandas as pd
import yaml
from workspace import REPOSITORY, Workspace


def test_the_smoke_study_agrees_with_theory_and_what_runs_again(tmp_path):
    config = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    del config["evaluation"]
    config |= {"results": "results", "checkpoints": {"seed0": {"seed": 0}}, "distortion": {}}
    study = Workspace.make(tmp_path / "study", "small_digits.py", config)
    study.config["study"] = str(REPOSITORY / "config/digits.py")
    file = "results/distortion/seed0.h5"
    assert study.run(file) == {"train_checkpoint": 1, "compute_distortion": 1}
    for _, found in pd.read_hdf(study.path(file), "agreement").iterrows():
        assert 0 < found["standard_error"] < 0.2 * found["measured"]
        assert abs(found["measured"] - found["predicted"]) < 3 * found["standard_error"]

    study.config["features_dtype"] = "float16"
    study.config["compute"] = {"batch_size": 7, "memory_mb": 300, "threads": 2}
    study.config["scoring"]["damping"] = 1
    assert study.would_run(file) == {}
    study.config["projection"]["seed"] = 1
    assert study.would_run("all")["compute_distortion"] == 1

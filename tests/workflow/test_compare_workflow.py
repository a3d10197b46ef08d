"""Two runs compared under Snakemake."""

import shutil

import pandas as pd
import pytest
from refusals import message


@pytest.fixture
def study(trained, tmp_path):
    return trained.copy(tmp_path / "study")


def test_two_runs_compared_by_one_command(study):
    shutil.copytree(study.path("results/scores"), study.path("other/scores"))
    assert study.run("compare", "--config", "compare=other") == {"compare_runs": 1}
    table = pd.read_hdf(study.path("results/comparison.h5"), "experiments")
    assert table["n_targets"].tolist() == [6, 1]
    assert table["overlap_positive"].tolist() == [1, 1]
    printed = study.path("results/logs/compare_runs.log").read_text()
    assert "rank_correlation" in printed
    assert "Found nothing at: nowhere/scores/few.h5" in message(
        study.fail("-n", "compare", "--config", "compare=nowhere")
    )


def test_a_comparison_follows_the_other_run(study):
    shutil.copytree(study.path("results/scores"), study.path("other/scores"))
    command = ("compare", "--config", "compare=other")
    assert study.run(*command) == {"compare_runs": 1}
    assert study.would_run(*command) == {}
    path = study.path("other/scores/few.h5")
    path.write_bytes(path.read_bytes())
    assert study.would_run(*command) == {"compare_runs": 1}

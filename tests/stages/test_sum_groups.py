"""Sums of scores by groups, from files, agree with pandas."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from linear_study import with_two_checkpoints
from pages import follow
from pipeline import averaged, read_scores, run_stages, scores_spec

from trak_core.config.memory_needs import GroupsNeed
from trak_core.stages.sum_groups import sum_groups

COLUMNS = """

def train_columns():
    return {"annotator": ["anna", "bert", "cleo"] * 10, "batch": [7] * 30}
"""
SETTINGS = {"combine": "unit_average", "model_output": "regression"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a study with columns, with three kinds of files of scores."""
    folder = tmp_path_factory.mktemp("groups")
    study, checkpoints, targets = with_two_checkpoints(folder)
    study.write_text(study.read_text() + COLUMNS)
    run_stages(folder / "full", study, checkpoints, targets, **SETTINGS)
    kept = {"made": folder / "full", "keep": "top_k"}
    run_stages(folder / "top_k", study, checkpoints, targets, **SETTINGS, **kept)
    run_stages(folder / "exact", study, checkpoints, targets, **SETTINGS, proj_dim=None)
    return folder, study, checkpoints, targets


def summed(made, way, group_by=("annotator",), memory_mb=500) -> Path:
    folder, study, checkpoints, targets = made
    proj_dim = None if way == "exact" else 8
    spec = scores_spec(checkpoints, targets, **SETTINGS, proj_dim=proj_dim)
    parts = [folder / way / f"scores/mine/{c}.h5" for c in checkpoints]
    phis = [folder / f"full/features/{c}/train.h5" for c in checkpoints] if way == "top_k" else []
    scores = folder / way / "scores/with_columns.h5"
    averaged(scores, parts, spec, phis, study_file=study)
    path = folder / way / "groups.h5"
    sum_groups(
        groups=path,
        scores=scores,
        checkpoint_scores=parts,
        features=phis,
        spec=spec,
        group_by=list(group_by),
        code="code",
        memory_mb=memory_mb,
    )
    return path


@pytest.mark.parametrize("way", ["full", "top_k", "exact"])
def test_groups_are_those_of_pandas(made, way):
    path = summed(made, way, ["batch", "annotator"])
    scores = read_scores(made[0] / ("full" if way == "top_k" else way) / "scores/mine.h5")
    # In a regression scores have the sign that improves the target.
    about = pd.read_hdf(made[0] / way / "scores/mine.h5", "targets").set_index("id")
    scores *= np.sign(about["label"] - about["prediction"])
    by = scores.groupby(np.array(["anna", "bert", "cleo"] * 10))
    targets = pd.read_hdf(path, "targets", where="column == annotator")
    assert targets["target_id"].tolist() == scores.columns.tolist() * 3
    for key, expected in (("sum", by.sum()), ("mean", by.mean())):
        values = targets[key].to_numpy().reshape(3, -1)
        np.testing.assert_allclose(values, expected.to_numpy(), atol=1e-6)
    groups = pd.read_hdf(path, "groups")
    assert groups["group"].tolist() == ["7", "anna", "bert", "cleo"]
    assert groups["n"].tolist() == [30, 10, 10, 10]
    mean = [scores.to_numpy().mean(), *by.mean().mean(axis=1)]
    np.testing.assert_allclose(groups["mean"], mean, atol=1e-6)
    assert (groups["low"] < groups["mean"]).all()
    assert (groups["mean"] < groups["high"]).all()
    pairs = pd.read_hdf(path, "differences")
    assert (pairs["group"] + "-" + pairs["other"]).tolist() == [
        "anna-bert",
        "anna-cleo",
        "bert-cleo",
    ]
    np.testing.assert_allclose(pairs["difference"].iloc[0], mean[1] - mean[2], atol=1e-6)


def test_memory_changes_nothing(made, monkeypatch):
    much = pd.read_hdf(summed(made, "full"), "targets")
    monkeypatch.setattr(GroupsNeed, "targets", lambda *_: 2)  # of three
    little = pd.read_hdf(summed(made, "full", memory_mb=1), "targets")
    pd.testing.assert_frame_equal(much, little, rtol=1e-9)


def test_one_group_has_no_differences(made):
    with pd.HDFStore(summed(made, "full", ["batch"]), "r") as store:
        assert {key for key in store if "spec" not in key} == {"/groups", "/targets"}


def test_the_page_reads_groups(made, tmp_path, monkeypatch):
    (tmp_path / "results/groups").mkdir(parents=True)
    shutil.copy(summed(made, "full"), tmp_path / "results/groups/held-out.h5")
    (printed,) = follow("docs/how-to/groups.md", tmp_path, monkeypatch)
    assert "anna" in printed

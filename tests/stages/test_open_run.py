"""A finished run opened in Python: the numbers of its files, and scores of further targets."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from few_words import write
from linear_study import STUDY, with_two_checkpoints
from pipeline import read_scores, run_config, run_stages
from refused import refused

import trak_core

TOP = 6
# The ids of the study's targets are not row numbers, so this function encodes a row.
ENCODE = """

def encode(row):
    return x[row], y[row]
"""


@pytest.fixture(scope="module", params=["full", "top_k"])
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("opened")
    study, checkpoints, targets = with_two_checkpoints(folder)
    given = {"model_output": "regression", "proj_dim": 8, "top": TOP}
    run_stages(folder / "full", study, checkpoints, targets, **given)
    kept = folder / request.param
    run_stages(kept, study, checkpoints, targets, keep=request.param, **given)
    return trak_core.open(str(kept)), read_scores(folder / "full/scores/mine.h5")


def test_the_strongest_scores_are_those_of_the_matrix(opened):
    """For every k up to the number in the file, and beyond it if the file has all scores."""
    results, matrix = opened
    scores = results.scores("mine")
    for k in (1, 4, TOP, 7, 29, 31) if scores.read_matrix else (1, 4, TOP):
        for table, sign in ((scores.top(k), 1), (scores.bottom(k), -1)):
            assert table["target"].drop_duplicates().tolist() == [*matrix.columns]
            for target, own in table.groupby("target"):
                signed = (sign * matrix[target]).sort_values(ascending=False, kind="stable")
                expected = sign * signed[signed > 0].iloc[:k]
                assert own["train"].tolist() == expected.index.tolist()
                assert own["rank"].tolist() == [*range(1, len(expected) + 1)]
                np.testing.assert_allclose(own["score"], expected, rtol=1e-5)


def test_scores_of_a_training_sample_for_all_targets(opened):
    results, matrix = opened
    scores = results.scores("mine")
    if scores.read_matrix:
        pushed = matrix
    else:
        both = pd.concat([scores.top(TOP), scores.bottom(TOP)])
        is_kept = both.assign(kept=True).pivot_table("kept", "train", "target")
        pushed = matrix.where(is_kept.reindex(matrix.index).notna())
    for train_id in matrix.index:
        table = scores.of_train(train_id)
        expected = pushed.loc[train_id].dropna().sort_values(ascending=False)
        assert table["target"].tolist() == expected.index.tolist()
        np.testing.assert_allclose(table["score"], expected, rtol=1e-5)


def test_experiments_and_errors_for_unknown_names(opened):
    results, matrix = opened
    assert results.experiments == ["mine"]
    assert repr(results).endswith(": mine")
    assert "<td>30</td>" in results._repr_html_()
    with refused("artifacts.no_experiment", "other", "mine"):
        results.scores("other")
    scores = results.scores("mine")
    with refused("artifacts.no_sample", "'target-9'", 30):
        scores.of_train("target-9")
    if scores.read_matrix:
        assert scores.frame.equals(matrix)
    else:
        for read in (lambda: scores.frame, lambda: scores.top(TOP + 1)):
            with refused("artifacts.no_matrix", "top_k"):
                read()


@pytest.mark.parametrize("projection", [{"proj_dim": 8}, "exact"], ids=["projected", "exact"])
def test_further_targets_have_the_scores_of_an_experiment(projection, tmp_path):
    with_two_checkpoints(tmp_path)
    (tmp_path / "study.py").write_text(STUDY + ENCODE)
    rows = [31, 35, 2, 39, 33]
    write(tmp_path / "asked.jsonl", [{"row": row} for row in rows])
    config = {
        "study": "study.py",
        "model_output": "regression",
        "checkpoints": {"c0": "c0.pt", "c1": "c1.pt"},
        "experiments": {"asked": {"data": "asked.jsonl"}},
        "projection": projection,
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    results = run_config(tmp_path / "mine.yaml")
    expected = read_scores(results / "scores/asked.h5")
    run = trak_core.open(str(results))
    written = run.scores("asked")
    assert written.frame.equals(expected)
    samples = [run.sample(number, "asked") for number in range(len(rows))]
    inputs, labels = (torch.stack([sample[i] for sample in samples]) for i in (0, 1))
    atol = 1e-6 * float(np.ptp(expected.to_numpy()))
    for keep in ("full", "top_k"):
        scores = run.score((inputs, labels), keep=keep, top=TOP)
        if keep == "full":
            pd.testing.assert_frame_equal(
                scores.frame, expected, check_names=False, rtol=0, atol=atol
            )
        for own, of_file in (
            (scores.top(5), written.top(5)),
            (scores.bottom(5), written.bottom(5)),
            (scores.targets, written.targets),
        ):
            pd.testing.assert_frame_equal(own[of_file.columns], of_file, atol=atol, rtol=1e-6)
        assert scores.unit == written.unit

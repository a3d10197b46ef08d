"""A finished run opened in Python: the numbers of its files, and scores of further targets."""

import numpy as np
import pandas as pd
import pytest
from linear_study import with_two_checkpoints
from pipeline import read_scores, run_stages
from refused import refused

import trak_core

TOP = 6


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
    with refused("artifacts.no_sample", "'target-9'"):
        scores.of_train("target-9")
    if scores.read_matrix:
        assert scores.frame.equals(matrix)
    else:
        for read in (lambda: scores.frame, lambda: scores.top(TOP + 1)):
            with refused("artifacts.no_matrix", "top_k"):
                read()

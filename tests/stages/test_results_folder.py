"""A results folder, opened for a notebook: the same numbers as the files'."""

import numpy as np
import pytest
from linear_study import with_two_checkpoints
from pipeline import read_scores, run_stages
from refused import refused

import trak_core


@pytest.fixture(scope="module", params=["full", "top_k"])
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("opened")
    study, checkpoints, targets = with_two_checkpoints(folder)
    given = {"model_output": "regression", "proj_dim": 8, "top": 30}
    run_stages(folder / "full", study, checkpoints, targets, **given)
    kept = folder / request.param
    run_stages(kept, study, checkpoints, targets, keep=request.param, **given)
    return trak_core.open(str(kept)), read_scores(folder / "full/scores/mine.h5")


def test_the_strongest_are_those_of_the_matrix(opened):
    results, scores = opened
    top = results.top("mine", "target-1", k=4)
    expected = scores["target-1"].sort_values(ascending=False)
    assert top["train_id"].tolist() == [*expected.index[:4], *expected.index[-4:]]
    np.testing.assert_allclose(top["score"], expected.loc[top["train_id"]], rtol=1e-5)
    assert top["label"].tolist() == results.train("mine")["label"].loc[top["train_id"]].tolist()


def test_from_a_training_sample_to_the_targets_that_it_pushed(opened):
    results, scores = opened
    pushed = results.reverse("mine", 7)
    expected = scores.loc[7].sort_values(ascending=False)
    assert pushed["target_id"].tolist() == expected.index.tolist()
    np.testing.assert_allclose(pushed["score"], expected, rtol=1e-5)
    labels = results.targets("mine")["label"].loc[expected.index]
    assert pushed["label"].tolist() == labels.tolist()


def test_it_says_what_there_is(opened):
    results, scores = opened
    assert results.experiments == ["mine"]
    assert repr(results).endswith(": mine")
    assert all(text in results._repr_html_() for text in ("mine", "<td>3</td>", "<td>30</td>"))
    with refused("artifacts.no_experiment", "other", "mine"):
        results.targets("other")
    with refused("artifacts.no_sample", "'target-9'", 3, "'target-3'"):
        results.top("mine", "target-9")
    if results.folder.name == "full":
        assert results.scores("mine").equals(scores)
    else:
        with refused("artifacts.no_matrix", "top_k"):
            results.scores("mine")

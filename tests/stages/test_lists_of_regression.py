"""Lists of a regression with planted wrong labels. A larger prediction may be a worse one."""

import numpy as np
import pandas as pd
import pytest
from linear_study import with_two_checkpoints
from pipeline import run_stages, scores_spec, self_influence
from wrong_numbers import OVERSTATED, WRONG, auc, with_three_checkpoints

from trak_core.stages.write_list import write_list

GIVEN = {"model_output": "regression", "damping": 0.1}
PROJECTION = {"kind": "rademacher", "proj_dim": 64, "seed": 0}
N_TARGETS = 200


def lists_of(folder, study, checkpoints, targets):
    """Return suspects, drop and select, indexed by sample, and the path of the scores."""
    path = run_stages(folder, study, checkpoints, targets, proj_dim=64, top=20, **GIVEN)
    spec = scores_spec(checkpoints, targets, projection=PROJECTION, **GIVEN)
    own = self_influence(folder, spec)
    lists = {}
    for kind in ("suspects", "drop", "select"):
        files = {"listed": folder / f"{kind}.csv", "scores": path}
        files["self_influence"] = [own] if kind == "suspects" else []
        write_list(**files, spec=spec, kind=kind, fraction=0.05, code="code")
        lists[kind] = pd.read_csv(folder / f"{kind}.csv").set_index("id")
    return lists, path


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return the study's checkpoints, its lists for all targets, and the path of the scores."""
    folder = tmp_path_factory.mktemp("first")
    study, checkpoints = with_three_checkpoints(folder)
    return checkpoints, *lists_of(folder, study, checkpoints, list(range(N_TARGETS)))


@pytest.fixture(scope="module", params=["all", "predicted too low"])
def lists_and_scores(request, first, tmp_path_factory):
    checkpoints, lists, path = first
    if request.param == "all":
        return lists, path
    targets = pd.read_hdf(path, "targets")
    is_low = targets["prediction"] < targets["label"]
    folder = tmp_path_factory.mktemp("some")
    study, _ = with_three_checkpoints(folder, made=checkpoints)
    return lists_of(folder, study, checkpoints, targets.loc[is_low, "id"].tolist())


def test_help_and_harm_use_the_sign_that_improves_each_target(lists_and_scores):
    lists, path = lists_and_scores
    targets, scores = (pd.read_hdf(path, key) for key in ("targets", "scores"))
    improves = np.sign(targets["label"].to_numpy() - targets["prediction"].to_numpy())
    assert targets["improves"].tolist() == improves.tolist()
    gains = scores.to_numpy(np.float64) * improves
    help_, harm = (np.maximum(part, 0).mean(axis=1) for part in (gains, -gains))
    suspects = lists["suspects"].sort_index()
    np.testing.assert_allclose(suspects["harm"], harm, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(suspects["help"], help_, rtol=1e-5, atol=1e-9)
    assert suspects["worth_a_look"].tolist() == (suspects["harm"] > suspects["help"]).tolist()
    assert set(lists["drop"].index) == set(suspects.index[suspects["worth_a_look"] == 1])


def test_wrong_labels_of_either_kind_come_first(lists_and_scores):
    """Labels that are too large and too small are both found."""
    lists, _ = lists_and_scores
    suspects = lists["suspects"]
    by_row = suspects.sort_index()
    assert auc(by_row["harm"].to_numpy()) > 0.97
    assert auc(by_row["self_influence"].to_numpy()) > 0.97
    assert np.isin(suspects.index[: len(WRONG)], WRONG).mean() > 0.7
    first_ones = suspects.index[: len(WRONG)]
    assert np.isin(first_ones, OVERSTATED).any()
    assert np.isin(first_ones, [i for i in WRONG if i not in OVERSTATED]).any()


def test_few_wrong_labels_are_selected(first):
    _, lists, _ = first
    assert lists["suspects"].loc[OVERSTATED, "worth_a_look"].mean() > 0.8
    assert len(lists["select"]) == 25
    assert np.isin(lists["select"].index, WRONG).mean() < 0.1


def test_lists_of_negated_and_scaled_labels_are_the_same(first, tmp_path):
    """Multiplication by -1 and by powers of two is exact in binary numbers."""
    checkpoints, lists, _ = first
    scale = 0.25
    study, _ = with_three_checkpoints(tmp_path, made=checkpoints, sign=-1, scale=scale)
    others, _ = lists_of(tmp_path, study, checkpoints, list(range(N_TARGETS)))
    for kind, rows in lists.items():
        other = others[kind]
        assert other.index.tolist() == rows.index.tolist()
        for name in {"harm", "help", "score", "worth_a_look", "self_influence"} & set(rows):
            expected = rows[name] * (1 if name == "worth_a_look" else scale)
            np.testing.assert_allclose(other[name], expected, rtol=1e-6)


def test_an_offset_of_labels_changes_little(first, tmp_path):
    checkpoints, lists, _ = first
    study, _ = with_three_checkpoints(tmp_path, made=checkpoints, offset=-64)
    others, _ = lists_of(tmp_path, study, checkpoints, list(range(N_TARGETS)))
    harm, other = (each["suspects"].sort_index()["harm"] for each in (lists, others))
    np.testing.assert_allclose(other, harm, atol=1e-3 * harm.max())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("larger_is_better", [True, False, None])
def test_help_and_harm_need_larger_is_better(tmp_path, larger_is_better, shards):
    """A user-defined output has help and harm only if the config sets `larger_is_better`."""
    study, checkpoints, targets = with_two_checkpoints(tmp_path)
    function = "def f(returned, label):\n    return -(returned[0] - label).square() / 2\n"
    study.write_text(f"{study.read_text()}\n\n{function}")
    given = {"model_output": f"{study}:f", "damping": 2}
    words = {} if larger_is_better is None else {"larger_is_better": larger_is_better}
    words["function"] = given["model_output"]
    sizes = {"proj_dim": 8, "shards": shards}
    path = run_stages(tmp_path, study, checkpoints, targets, output_words=words, **sizes, **given)
    spec = scores_spec(checkpoints, targets, projection=PROJECTION | {"proj_dim": 8}, **given)
    train = pd.read_hdf(path, "train")
    if larger_is_better:
        scores = pd.read_hdf(path, "scores").to_numpy(np.float64)
        np.testing.assert_allclose(train["harm"], np.maximum(-scores, 0).mean(axis=1), rtol=1e-5)
        assert pd.read_hdf(path, "targets")["improves"].tolist() == [1, 1, 1]
        asked = {"listed": tmp_path / "a.csv", "scores": path, "spec": spec, "code": "code"}
        write_list(**asked, kind="drop")
        return
    assert not {"help", "harm"} & set(train)
    assert "improves" not in pd.read_hdf(path, "targets")

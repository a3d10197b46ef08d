"""Exact scores: the stages against an independent float64 formula."""

import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import read_scores
from trained_cases import assert_close

from trak_core.errors import InputError
from trak_core.gradients import check_finite_gramian
from trak_core.stages import compute_gramian as gramian


@pytest.mark.parametrize(
    ("n_checkpoints", "combine", "weighting", "power", "normalize"),
    [
        (1, "product_of_averages", "plain", 0.5, False),
        (3, "product_of_averages", "plain", 0.5, False),
        (3, "product_of_averages", "curvature", 0.5, False),
        (3, "average_of_products", "curvature", 1, False),
        (3, "average_of_products", "plain", 1, True),
        (3, "unit_average", "curvature", 0.75, False),
        (3, "unit_average", "curvature", 0.75, True),
        (3, "unit_average", "plain", 1, False),
    ],
)
def test_scores_equal_the_formula_in_float64(
    case, tmp_path, n_checkpoints, combine, weighting, power, normalize
):
    settings = {"damping": 2, "weighting": weighting, "power": power, "combine": combine}
    settings["normalize"] = normalize
    scores = case.exact_stages(tmp_path, n_checkpoints, made=case.features(), **settings)
    scores = read_scores(scores)
    assert scores.index.tolist() == case.train.ids
    assert scores.columns.tolist() == case.targets
    assert_close(scores.to_numpy(), case.expected(n_checkpoints, **settings), 1e-5)


@pytest.mark.parametrize("weighting", ["plain", "curvature"])
def test_without_damping_where_the_gramian_is_well_conditioned(case, tmp_path, weighting):
    """Ten training samples: a float32 gradient is lost by the condition number."""
    text = case.path.read_text()
    for n_train in ("[:150]", "[:342]"):
        text = text.replace(n_train, "[:10]")
    path = tmp_path / case.path.name
    path.write_text(text)
    settings = {"damping": 0, "weighting": weighting}
    scores = read_scores(case.exact_stages(tmp_path / "results", path=path, **settings))
    assert_close(scores.to_numpy(), case.expected(n_train=10, **settings), 1e-5)


@pytest.mark.parametrize("other", [{"batch_size": 41}, {"batch_size": 500}, {"memory_mb": 1}])
def test_batches_and_memory_do_not_change_scores(digits, tmp_path, other):
    first = digits.exact_stages(tmp_path / "first", 1, made=digits.features())
    second = digits.exact_stages(tmp_path / "second", 1, **other)
    assert_close(*(read_scores(path).to_numpy() for path in (second, first)), 1e-5)


def test_a_gramian_is_symmetric_and_carries_what_features_carry(digits, tmp_path):
    final = digits.exact_stages(tmp_path, 1, batch_size=32)
    square = pd.read_hdf(tmp_path / "gramian/c0/train.h5", "gramian")
    assert square.index.tolist() == square.columns.tolist() == digits.train.ids
    np.testing.assert_array_equal(square, square.T)
    assert set(square.dtypes) == {np.dtype(np.float64)}
    cross = pd.read_hdf(tmp_path / "gramian/c0/mine.h5", "gramian")
    assert cross.index.tolist() == digits.train.ids
    assert cross.columns.tolist() == digits.targets
    j, f, y = digits.jacobians["c0"][0]
    assert_close(square.to_numpy(), j @ j.T, 1e-5)
    table = pd.read_hdf(final, "train")
    np.testing.assert_array_equal(table["label"], y)
    np.testing.assert_allclose(table["output"], f, rtol=1e-4, atol=1e-4)


def test_a_subset_of_parameters(digits, tmp_path):
    digits.exact_stages(tmp_path, 1, parameters=["8.*"])
    gramian = pd.read_hdf(tmp_path / "gramian/c0/train.h5", "gramian").to_numpy()
    j = digits.jacobians["c0"][0][0][:, -170:]  # the last layer's
    assert_close(gramian, j @ j.T, 1e-5)


def test_a_second_run_writes_the_same_bytes(digits, tmp_path):
    digits.exact_stages(tmp_path)
    first = digits.features()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.h5"))
    assert len(files) == 10
    for file in files:
        assert (tmp_path / file).read_bytes() == (first / file).read_bytes(), file


def test_a_singular_gramian_is_explained(cases, tmp_path):
    case = cases["diabetes"]
    with pytest.raises(InputError, match=r"condition number .* Raise `scoring.damping`"):
        case.exact_stages(tmp_path, 1, damping=0, made=case.features())
    assert not (tmp_path / "scores").exists()


def test_a_budget_that_is_too_small_is_refused_by_the_jobs(cases, tmp_path):
    found = (
        r"must hold a Gramian of 342 x 342 inner products: 1 MiB\. Found 0\. Raise it, take a proj"
    )
    with pytest.raises(InputError, match=found):
        cases["diabetes"].exact_stages(tmp_path, 1, memory_mb=0)
    assert not list(tmp_path.rglob("*.h5"))


def test_not_a_number_names_samples(digits, tmp_path):
    # Finite weights; sums of them are not.
    bad = digits.spoiled(tmp_path / "bad.pt", lambda state: state["6.weight"].fill_(3e38))
    expected = r"Model outputs must be finite.* for the samples \d+, .* and more"
    with pytest.raises(InputError, match=expected):
        digits.exact_stages(tmp_path / "results", checkpoints=bad)
    assert not list((tmp_path / "results").rglob("*.h5*"))


def test_a_gradient_that_is_not_finite_names_its_sample():
    """Its row and column are, whichever split it is in; others are not blamed."""
    values = np.ones((4, 4))
    values[2], values[:, 2] = np.nan, np.nan
    with pytest.raises(InputError, match=r"for the samples c\. Look"):
        check_finite_gramian(values, list("abcd"), list("abcd"))
    values = np.ones((4, 3))
    values[:, 1] = np.inf
    with pytest.raises(InputError, match=r"for the samples y\. Look"):
        check_finite_gramian(values, list("abcd"), list("xyz"))
    values = np.ones((3, 3))
    values[0, 0] = np.inf
    with pytest.raises(InputError, match=r"for the samples a\. Look"):
        check_finite_gramian(values, list("abc"), list("abc"))


def test_memory_that_runs_out_halves_the_blocks(digits, tmp_path, monkeypatch, capsys):
    real = gramian.train_gramian

    def tight(model, parameters, output, blocks):
        if len(blocks[0]) > 20:
            raise torch.OutOfMemoryError("no memory for so many")
        return real(model, parameters, output, blocks)

    first = digits.exact_stages(tmp_path / "first", 1, made=digits.features())
    monkeypatch.setattr(gramian, "train_gramian", tight)
    second = digits.exact_stages(tmp_path / "second", 1)
    assert "going on with 16 samples at once" in capsys.readouterr().out
    assert_close(*(read_scores(path).to_numpy() for path in (second, first)), 1e-5)

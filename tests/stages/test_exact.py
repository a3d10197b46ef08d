"""Gramians of the stages, against plain autograd. Exact scores: test_scores.py, tests/gramian."""

import numpy as np
import pandas as pd
import pytest
import torch
from pipeline import read_scores
from refused import refused
from trained_cases import assert_close

from trak_core.attribution.inner_products import check_finite
from trak_core.errors import InputError
from trak_core.gradients.gradient_consumers import Formed


@pytest.mark.parametrize("parameters", [None, ["8.*"]])
def test_gramians_are_inner_products_of_gradients(digits, tmp_path, parameters):
    """The gradients are those of all parameters, and of the last layer."""
    digits.stages(tmp_path, 1, batch_size=32, **({"parameters": parameters} if parameters else {}))
    square = pd.read_hdf(tmp_path / "gramian/c0/train.h5", "gramian")
    assert square.index.tolist() == square.columns.tolist() == digits.train.ids
    np.testing.assert_array_equal(square, square.T)
    assert set(square.dtypes) == {np.dtype(np.float64)}
    cross = pd.read_hdf(tmp_path / "gramian/c0/mine.h5", "gramian")
    assert cross.index.tolist() == digits.train.ids
    assert cross.columns.tolist() == digits.targets
    j = digits.jacobians["c0"][0][0][:, -170 if parameters else 0 :]
    assert_close(square.to_numpy(), j @ j.T, 1e-5)


@pytest.mark.parametrize(
    ("index", "ids", "blamed"),
    [
        (([2, slice(None)], [slice(None), 2]), "abcd", "c"),
        (([slice(None), 1],), "xyz", "y"),
        (([0, 0],), "abcd", "a"),
    ],
)
def test_a_gradient_that_is_not_finite_names_its_sample(index, ids, blamed):
    """It fills its row or column, or its square is too large. Others are not blamed."""
    values = np.ones((4, len(ids)))
    for row, column in index:
        values[row, column] = np.nan if blamed == "c" else np.inf
    with pytest.raises(InputError, match=rf"for the samples {blamed}\. "):
        check_finite(values, list("abcd"), list(ids), torch.zeros(2))


def test_a_model_output_that_is_not_finite_names_its_sample():
    outputs = torch.tensor([1.0, torch.nan])
    with refused("gradients.values_not_finite", "samples y"):
        check_finite(np.ones((4, 3)), list("abcd"), list("xyz"), outputs)


def test_memory_that_runs_out_halves_the_blocks(digits, tmp_path, monkeypatch, capsys):
    real = Formed.adding_to

    def tight(rows, parameters):
        if len(rows) > 20:
            raise torch.OutOfMemoryError("no memory for so many")
        return real(rows, parameters)

    first = digits.stages(tmp_path / "first", 1, made=digits.features())
    monkeypatch.setattr(Formed, "adding_to", tight)
    second = digits.stages(tmp_path / "second", 1)
    assert "Continuing with batches of 16 samples" in capsys.readouterr().out
    assert_close(*(read_scores(path).to_numpy() for path in (second, first)), 1e-5)

"""Tables of removals are compared with plain loops over retrained models."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from trak_core.lists.lists import best_in_turn
from trak_core.model_outputs.about_outputs import TABLE, about_output
from trak_core.stages.compare_removals import measures, removal_tables
from trak_core.study.retraining_draws import sizes_of


def tables(values, sizes):
    """Return the tables of models of a list with S sizes. Values have shape (draws, 1 + 2 S, m)."""
    by_subset = {}
    for measure, numbers in values.items():
        whole, own, random = np.split(numbers.swapaxes(0, 1)[:, None], [1, 1 + len(sizes)])
        for subset, part in {"everything": whole, "list": own, "random": random}.items():
            by_subset.setdefault(subset, {})[measure] = part
    return removal_tables(by_subset, sizes, range(numbers.shape[-1]))


def test_losses_are_those_of_torch():
    logits, labels = torch.randn(3, 7, 4, dtype=torch.float64), torch.arange(7) % 4
    p = logits.softmax(-1)[:, torch.arange(7), labels]
    f = torch.log(p) - torch.log1p(-p)
    predictions = logits.argmax(-1)
    numbers = f.numpy(), predictions.numpy(), labels.numpy()
    measured = measures(TABLE["image_classification"], *numbers)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(21, 4), labels.repeat(3), reduction="none"
    )
    np.testing.assert_allclose(measured["target_loss"], loss.reshape(3, 7), rtol=1e-10)
    assert measured["accuracy"].tolist() == (predictions == labels).double().tolist()
    assert measured["output"].tolist() == f.tolist()
    y = np.array([1.0, 2.0])
    regression = measures(TABLE["regression"], np.array([[1.5, 2.0]]), np.zeros((1, 2)), y)
    assert regression["target_loss"].tolist() == [[0.125, 0]]
    for about in (TABLE["loss"], TABLE["clip"], about_output("mine.py:cox")):
        assert set(measures(about, *numbers)) == {"output"}


def test_sizes_are_fractions_that_leave_a_sample():
    assert sizes_of([0.2, 0.05, 0.001], n_train=100, n_listed=100) == [1, 5, 20]
    assert sizes_of([0.05, 0.1, 0.2], n_train=100, n_listed=7) == [5, 7]
    assert sizes_of([0.99], n_train=10, n_listed=10) == [9]
    assert sizes_of([0.05, 0.1], n_train=10, n_listed=0) == []


def test_sizes_of_select_are_rounded_like_the_list():
    train = pd.DataFrame({"id": range(21), "help": 1.0, "harm": 0.0})
    top = pd.DataFrame({"target_id": [0], "rank": [1], "train_id": [3], "score": [1.0]})
    n_listed = len(best_in_turn(train, top, 0.2))
    assert n_listed == 5
    assert sizes_of([0.1, 0.2], 21, n_listed, rounds_up=True) == [3, 5]
    assert sizes_of([0.1, 0.2], 21, 21) == [2, 4]


def test_the_effect_of_a_seed_cancels_in_the_difference():
    """Three draws differ only by their seeds. The list increases the output by 1 at one size."""
    seeds = np.array([-4.0, 0.0, 7.0])[:, None, None]
    values = np.zeros((3, 5, 2)) + seeds
    values[:, 2] += 1  # the list's second size
    summary, targets = tables({"output": values}, [10, 20])
    rows = {(row.subset, row.n): row for row in summary.itertuples()}
    assert set(rows) == {
        ("everything", 0),
        *((subset, n) for subset in ("list", "random", "list less random") for n in (10, 20)),
    }
    assert (rows["list less random", 10].low, rows["list less random", 10].high) == (0, 0)
    assert (rows["list less random", 20].low, rows["list less random", 20].high) == (1, 1)
    assert rows["list", 20].mean == pytest.approx(2)
    assert rows["list", 20].low < -2
    assert targets.query("subset == 'list' and n == 20")["mean"].tolist() == [2, 2]
    assert "list less random" not in set(targets["subset"])


def test_models_that_agree_are_not_certain_of_other_targets():
    """If the fraction at the interval's end were true, all targets would agree in 5 % of cases."""
    values = np.ones((3, 3, 40))
    values[:, 1, :] = 0  # the list
    summary, _ = tables({"accuracy": values, "output": values}, [5])
    rows = {row.subset: row for row in summary.query("measure == 'accuracy'").itertuples()}
    for subset in ("everything", "random"):
        assert rows[subset].high == 1
        assert binom.pmf(40, 40, rows[subset].low) == pytest.approx(0.05)
    assert rows["list"].low == 0
    assert binom.pmf(0, 40, rows["list"].high) == pytest.approx(0.05)
    assert rows["list less random"].low == -1
    assert binom.pmf(40, 40, -rows["list less random"].high) == pytest.approx(0.05)
    assert set(summary.query("measure == 'output' and subset == 'list'")["high"]) == {0}


def test_a_wrong_prediction_does_not_shorten_an_interval():
    widths = []
    for n_wrong in (0, 1, 5):
        values = np.ones((5, 3, 50))
        values[:n_wrong, :, 7] = 0
        summary, _ = tables({"accuracy": values}, [5])
        (row,) = summary.query("subset == 'everything'").itertuples()
        widths.append(row.high - row.low)
    assert widths == sorted(widths)


def test_intervals_stay_within_the_range_of_a_measure():
    accuracies = np.array([1.0, 0.99, 1.0, 0.9])[:, None, None] * np.ones((4, 3, 30))
    accuracies[:, 2] -= 0.01 * np.arange(4)[:, None]
    values = {"accuracy": accuracies, "target_loss": 1 - accuracies, "output": accuracies - 1}
    summary, _ = tables(values, [5])
    rows = {(row.measure, row.subset): row for row in summary.itertuples()}
    assert rows["accuracy", "everything"].high == 1
    assert rows["target_loss", "everything"].low == 0
    assert rows["output", "everything"].high > 0
    assert rows["target_loss", "list less random"].low < 0

"""Lists of training samples, and tables of removals by them, agree with plain loops."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from trak_core.attribution.score_formulas import (
    Extremes,
    harmed_class,
    help_and_harm,
    improving_signs,
)
from trak_core.lists.lists import (
    best_in_turn,
    copies,
    most_consistent,
    most_harmful,
    nearest,
    suspects,
)
from trak_core.model_outputs.about_outputs import TABLE, about_output
from trak_core.runtime.files import write_csv
from trak_core.stages.compare_removals import measures, removal_tables
from trak_core.study.retraining_draws import sizes_of


@pytest.fixture
def scores():
    return np.random.default_rng(0).standard_normal((23, 9)).astype(np.float32)


@pytest.mark.parametrize("signs", [[1] * 9, [-1] * 9, [1, -1, 1, 0, -1, -1, 0, 1, 1]])
def test_help_and_harm_are_means_of_what_improves_and_worsens_targets(scores, signs):
    signs = np.array(signs)
    signed = scores.astype(float) * signs
    expected = np.stack([np.maximum(signed, 0), np.maximum(-signed, 0)], axis=1).mean(axis=2)
    both = help_and_harm(scores, signs)
    np.testing.assert_allclose(both, expected, rtol=1e-12)
    parts = [help_and_harm(scores[i : i + 5], signs) for i in range(0, 23, 5)]
    assert np.array_equal(np.concatenate(parts), both)


def test_which_sign_improves_a_target():
    labels, predictions = np.array([2, 0, -1, 7]), np.array([1.5, 0.5, -1, 7.5], dtype=np.float32)
    assert improving_signs("closer", labels, predictions).tolist() == [1, -1, 0, -1]
    assert improving_signs("larger", labels, predictions).tolist() == [1, 1, 1, 1]


def test_the_harmed_class_has_the_lowest_mean(scores):
    labels = np.array([4, 7, 7, 4, -1, 7, 4, 4, -1])
    expected = [
        min(
            sorted(set(labels.tolist())),
            key=lambda c: np.mean(np.minimum(row[labels == c], 0), dtype=float),
        )
        for row in scores
    ]
    assert harmed_class(scores, labels).tolist() == expected
    assert harmed_class(np.ones((2, 9), dtype=np.float32), labels).tolist() == [-1, -1]


@pytest.fixture
def train():
    return pd.DataFrame({
        "id": ["a", "b", "c", "d"],
        "label": [0, 1, 2, 3],
        "help": np.array([1.0, 2.0, 0.5, 0.0], dtype=np.float32),
        "harm": np.array([2.0, 1.0, 3.0, 0.0], dtype=np.float32),
        "harmed_label": [1, 0, 0, 2],
        "annotator": ["anna", "bert", "anna", "bert"],
    })


def test_suspects_are_ordered_by_harm(train):
    rows = suspects(train)
    assert rows.columns[:6].tolist() == [
        *("id", "rank", "worth_a_look", "suggested_label", "harm", "help")
    ]
    assert rows["id"].tolist() == ["c", "a", "b", "d"]
    assert rows["rank"].tolist() == [1, 2, 3, 4]
    assert rows["worth_a_look"].tolist() == [1, 1, 0, 0]
    assert rows["suggested_label"].tolist() == [0, 1, 0, 2]
    assert rows["annotator"].tolist() == ["anna", "anna", "bert", "bert"]
    assert "suggested_label" not in suspects(train.drop(columns="harmed_label"))


def test_samples_to_drop_harm_more_than_they_help(train):
    rows = most_harmful(train)
    assert rows[["id", "rank", "score"]].to_numpy().tolist() == [["c", 1, -2.5], ["a", 2, -1.0]]


def test_targets_take_the_best_in_turn(train):
    """Target 8 takes d, because b is taken. The other samples follow by their scores."""
    of_seven = [(7, 1, "b", 2.0), (7, 2, "d", 1.0), (7, 1, "c", -3.0)]
    rows = [*of_seven, (8, 1, "b", 0.5), (8, 2, "d", 0.25), (8, 3, "a", -0.5)]
    top = pd.DataFrame(rows, columns=["target_id", "rank", "train_id", "score"])
    table = best_in_turn(train, top.sample(frac=1, random_state=0).sort_values("target_id"), 1.0)
    assert table[["id", "rank"]].to_numpy().tolist() == [["b", 1], ["d", 2], ["a", 3], ["c", 4]]
    assert table["score"].tolist() == [1.0, 0.0, -1.0, -2.5]
    assert best_in_turn(train, top, 0.3)["id"].tolist() == ["b", "d"]
    assert best_in_turn(train, top, 0.01)["id"].tolist() == ["b"]


@pytest.mark.parametrize("scale", [1, 4])
def test_the_most_consistent_help_has_the_largest_share(train, scale):
    """The size of a sample's scores changes nothing. A sample with scores of 0 is in between."""
    train.loc[1, ["help", "harm"]] *= scale
    rows = most_consistent(train, 1.0)
    assert rows["id"].tolist() == ["b", "d", "a", "c"]
    assert rows["score"].tolist() == [scale, 0.0, -1.0, -2.5]
    assert most_consistent(train, 0.3)["id"].tolist() == ["b", "d"]


@pytest.mark.parametrize("block", [1, 4, 100])
def test_the_nearest_rows_are_those_of_all_cosines(block):
    rows = np.random.default_rng(1).standard_normal((11, 6))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    part = nearest(rows, rows[3:9], block=block, first=3)
    expected = np.argsort(-cosines[:, 3:9], axis=0)[:5]
    assert np.array_equal(part.rows, expected)
    np.testing.assert_allclose(part.scores, np.take_along_axis(cosines[:, 3:9], expected, 0), 1e-5)


def test_copies_are_much_closer_than_other_neighbours():
    scores = np.array([
        [1.0, 0.999, 0.95, 0.9, np.nextafter(np.float32(1), np.float32(2))],
        [0.9, 0.98, 0.94, -np.inf, 1.0],
        [0.8, 0.97, 0.93, -np.inf, 1.0],
        [0.7, 0.96, 0.92, -np.inf, 1.0],
        [0.6, 0.95, 0.91, -np.inf, 1.0],
    ], dtype=np.float32)  # fmt: skip
    pairs, rows, cosines, closeness = copies(Extremes(np.arange(25).reshape(5, 5), scores))
    assert pairs.tolist() == [0, 1, 4]
    assert rows.tolist() == [0, 1, 4]
    np.testing.assert_allclose(closeness, [1, 0.98, 1], atol=1e-4)
    assert cosines.max() == 1


def test_no_cell_of_a_list_is_a_formula(tmp_path):
    ids = ["=cmd|x", "-1", "@a", "plain, 'x'", "\uff1dcmd|x", "\n=1"]
    frame = pd.DataFrame({"id": ids, "score": [-1.5, 2, 3, 4, 5, 6], "=own": 7})
    write_csv(tmp_path / "lists/mine.csv", frame)
    back = pd.read_csv(tmp_path / "lists/mine.csv")
    assert back.columns.tolist() == ["id", "score", "'=own"]
    assert back["id"].tolist() == ["'=cmd|x", "'-1", "'@a", "plain, 'x'", "'\uff1dcmd|x", "'\n=1"]
    assert back["score"].tolist() == frame["score"].tolist()


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

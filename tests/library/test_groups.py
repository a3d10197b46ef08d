"""Sums of scores by groups agree with plain loops. Their intervals contain the true values."""

import numpy as np
import pandas as pd
import pytest
from refusals import preflight
from refused import refused

from trak_core.attribution.score_formulas import combined
from trak_core.lists.groups import (
    N_DRAWS,
    RUN_DRAWS,
    SAMPLE_DRAWS,
    Grouping,
    GroupSums,
    check_groups,
    group_interval,
    group_tables,
    run_weights,
    sample_variances,
)
from trak_core.settings import Combine

N, M, RUNS = 37, 5, [0, 0, 1, 2, 2]
C = len(RUNS)


@pytest.fixture
def parts():
    random = np.random.default_rng(0)
    similarities = random.standard_normal((C, N, M))
    return similarities, random.uniform(0, 1, (C, N)), random.uniform(1, 3, C)


@pytest.mark.parametrize("block", [4, N])
@pytest.mark.parametrize("combine", list(Combine))
def test_sums_and_draws_are_those_of_plain_loops(parts, combine, block):
    similarities, loss_weights, norms = parts
    norms = norms if combine is Combine.UNIT_AVERAGE else np.ones(C)
    numbers = [np.arange(N) % 3, 3 + (np.arange(N) > 30)]
    weights = run_weights(RUNS)
    sums = GroupSums(5, M, combine, weights)
    for start in range(0, N, block):
        rows = slice(start, start + block)
        own = [of_column[rows] for of_column in numbers]
        sums.add(similarities[:, rows], loss_weights[:, rows], norms, own)
    times = np.random.default_rng(1).poisson(1, (N, N_DRAWS))
    for draw in (0, 1, 17, 420):
        # A run that is drawn twice is used twice.
        copies = np.repeat(np.arange(C), weights[-(-draw // SAMPLE_DRAWS)].astype(int))
        terms = [(similarities[c], loss_weights[c], norms[c]) for c in copies]
        scores = combined(terms, combine)
        for group in range(5):
            rows = np.flatnonzero(numbers[0] == group if group < 3 else numbers[1] == group)
            if draw == 0:
                np.testing.assert_allclose(sums.plain[group], scores[rows].sum(axis=0), rtol=1e-10)
                continue
            often = times[rows, draw - 1 : draw]
            expected = (often * scores[rows]).sum(axis=0)
            np.testing.assert_allclose(sums.drawn[group, draw - 1], expected, atol=1e-10)
            assert sums.counts[group, draw - 1] == often.sum()


def sums_of(values, numbers, n_groups=1):
    """Sums of scores (runs, samples, targets), each run with a loss weight of 1."""
    n_runs, n_samples, n_targets = values.shape
    sums = GroupSums(n_groups, n_targets, Combine.AVERAGE_OF_PRODUCTS, run_weights(range(n_runs)))
    sums.add(values, np.ones((n_runs, n_samples)), [1.0] * n_runs, [numbers])
    return sums


def test_a_draw_has_as_many_runs_as_there_are_with_all_their_checkpoints():
    weights = run_weights(RUNS)
    assert weights.shape == (RUN_DRAWS + 1, C)
    assert (weights[0] == 1).all()
    assert (weights[:, 0] == weights[:, 1]).all()
    assert (weights[:, 3] == weights[:, 4]).all()
    assert (weights[:, [0, 2, 3]].sum(axis=1) == 3).all()
    assert (run_weights([0, 0]) == 1).all()


@pytest.mark.parametrize(
    ("n_runs", "n_samples", "size_of_runs"),
    [(1, 40, 0), (1, 5, 0), (3, 40, 0.3), (5, 40, 1), (10, 8, 0.3)],
)
def test_intervals_contain_the_true_mean(n_runs, n_samples, size_of_runs):
    """The true mean is 0.3. Each run shifts all samples. Each of 300 targets is an experiment."""
    random = np.random.default_rng(3)
    values = 0.3 + random.standard_normal((1, n_samples, 300))
    values = values + size_of_runs * random.standard_normal((n_runs, 1, 300))
    sums = sums_of(values, np.zeros(n_samples, dtype=int))
    draws = sums.drawn_means()[0].T
    variances = sample_variances(draws, n_samples)
    low, high = group_interval(draws, sums.plain[0] / n_samples, variances, n_runs)
    # A binomial number of 300 with p = .95 is in this range in 999 of 1,000 cases.
    assert 272 <= ((low <= 0.3) & (high >= 0.3)).sum() <= 296


def test_differences_are_paired():
    """A shift of all groups by a run cancels."""
    values = np.stack([np.full((60, 1), shift) for shift in (-5.0, 0.0, 5.0)])
    values[:, :30] += 1
    numbers = np.repeat([0, 1], 30)
    sums = sums_of(values, numbers, n_groups=2)
    drawn = sums.drawn_means()
    grouping = Grouping("who", ["anna", "bert"], numbers)
    ends = sums.plain, sums.plain
    table, targets, differences = group_tables(
        [grouping], sums.plain, drawn.mean(axis=2), ends, ["t"], n_runs=3
    )
    assert table[["column", "group", "n", "sum", "mean"]].to_numpy().tolist() == [
        ["who", "anna", 30, 30.0, 1.0],
        ["who", "bert", 30, 0.0, 0.0],
    ]
    assert (table["high"] - table["low"] > 5).all()
    (pair,) = differences.itertuples(index=False)
    assert tuple(pair)[:3] == ("who", "anna", "bert")
    assert tuple(pair)[3:] == pytest.approx((1, 1, 1))
    assert targets["target_id"].tolist() == ["t", "t"]
    assert targets["mean"].tolist() == table["mean"].tolist()


def test_the_interval_of_a_single_sample_has_no_width():
    sums = sums_of(np.full((1, 1, 1), 2.0), np.array([0]))
    draws = sums.drawn_means()[0].T
    low, high = group_interval(draws, np.array([2.0]), sample_variances(draws, 1), n_runs=1)
    assert (low[0], high[0]) == (2, 2)


def test_groups_are_sorted_and_few():
    grouping = Grouping.of("label", pd.Series([3, 10, 3]))
    assert list(grouping.names) == ["3", "10"]
    assert grouping.numbers.tolist() == [0, 1, 0]
    with refused("scoring.group_values", "seconds"):
        Grouping.of("seconds", [0.5, 1.0])
    with refused("scoring.many_groups", "200"):
        Grouping.of("id", range(200))
    own = pd.DataFrame({"annotator": ["anna"]})
    check_groups(["annotator", "label"], own)
    with refused("scoring.no_group_column", "annotatr", "annotator"):
        check_groups(["annotatr"], own)


def test_too_many_groups_of_labels_are_refused_before_any_job(tmp_path):
    """The labels in the data decide, not the number of classes of the model."""

    def check(n_labels, output="image_classification", n_outputs=120):
        study = tmp_path / f"study_{n_labels}.py"
        study.write_text(
            f"import torch\n\ndef make_model():\n    return torch.nn.Linear(2, {n_outputs})\n\n"
            f"def train_data():\n    return [(torch.ones(2), i % {n_labels}) for i in range(240)]\n"
        )
        groups = {"model_output": output, "group_by": ["label", "prediction"]}
        preflight(study, {"train": None}, **groups)

    check(100)
    with refused("scoring.many_groups", "101", tmp_path / "study_101.py"):
        check(101)
    with refused("stages.prediction_groups", "regression", tmp_path / "study_2.py"):
        check(2, "regression", n_outputs=1)

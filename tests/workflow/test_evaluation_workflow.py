"""An evaluation under Snakemake: what runs, what runs again, and what is refused before any job."""

import copy

import pandas as pd
import pytest
import yaml
from base_studies import EVALUATION, TRAINED
from refusals import check
from refused import refused
from workspace import set_key

from trak_core.config.cross_checks import check_columns, check_evaluation, check_sizes

# With the defaults of what `evaluated` leaves out.
FULL = {
    **TRAINED,
    "experiments": {"few": TRAINED["experiments"]["few"]},
    "scoring": {"keep": "full"},
    "projection": {"kind": "rademacher", "proj_dim": 32},
    "lists": {"drop": {"experiment": "few"}},
    "evaluation": EVALUATION,
}


@pytest.fixture
def study(evaluated, tmp_path):
    return evaluated.copy(tmp_path / "study")


def test_tables_of_an_evaluation_miss_no_value(evaluated):
    results = evaluated.path("results")
    for name, tables in {
        "evaluation/few.h5": ["summary", "targets", "checkpoints", "sweep", "best"],
        "self_influence.h5": ["train"],
        "removals/few.h5": ["summary", "targets"],
    }.items():
        for table in tables:
            assert not pd.read_hdf(results / name, table).isna().to_numpy().any(), (name, table)
    assert pd.read_hdf(results / "evaluation/few.h5", "summary")["method"].tolist() == [
        *("scores", "gradient_dot", "embedding_cosine", "random", "same_class"),
        "noise_ceiling",
    ]
    assert pd.read_hdf(results / "retrained/20-26.h5", "masks").shape == (7, 150)


CHANGES = {
    "nothing": ({}, {}),
    # 20-26 becomes 20-29.
    "more halves": (
        {"subsets": {"count": 52, "seeds": 2}},
        {"retrain_subsets": 4, "evaluate_scores": 1},
    ),
    "another sweep": ({"sweep": {"damping": [1, 5]}}, {"evaluate_scores": 1}),
    "other removals": (
        {"removals": EVALUATION["removals"] | {"n_removed": [10]}},
        {"retrain_removals": 5, "compare_removals": 1},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_runs_again(study, name):
    change, rules = CHANGES[name]
    study.config["evaluation"] |= change
    assert study.would_run("all") == (rules and rules | {"write_report": 1})


def test_damping_reruns_no_retraining_of_halves(study):
    study.config["scoring"]["damping"] = 1
    counts = study.would_run("all")
    assert counts["evaluate_scores"] == counts["compute_self_influence"] == 1
    # By the scores, and by the list that is made of them.
    assert counts["retrain_removals"] == 4
    assert not {"retrain_subsets", "compute_embeddings"} & set(counts)


def test_without_an_evaluation_nothing_of_it_runs(study):
    """The page of answers no longer has self-influence."""
    del study.config["evaluation"]
    assert study.would_run("all") == {"draw_influences": 1, "write_report": 1}


def test_a_users_ground_truth_takes_the_place_of_retraining(study):
    for key in ("masks", "outputs"):
        frame = pd.read_hdf(study.path("results/retrained/0-9.h5"), key)
        frame.to_hdf(study.path("mine.h5"), key=key)
    study.config["evaluation"] = {"ground_truth": "mine.h5"}
    again = {"evaluate_scores": 1, "write_report": 1}
    # The page of answers no longer has self-influence, which an evaluation asks for.
    assert study.run("all") == again | {"draw_influences": 1, "write_report_first": 1}
    assert study.would_run("all") == {}
    pd.DataFrame().to_hdf(study.path("mine.h5"), key="masks")
    assert study.would_run("all") == again


def test_a_study_whose_training_takes_no_data(study):
    path = study.path("small_digits.py")
    path.write_text(path.read_text().replace("data=None", "part=None"))
    with refused("config.preflight", "train(seed, steps, part=None)", "`data`", "'data'"):
        check(study, yaml.safe_dump(study.config).encode())


UNKNOWN = ("config.unknown_experiment", "few", "'many'")
BAD = {
    "both": ({"evaluation.ground_truth": "x.h5"}, "config.two_truths"),
    "unknown experiment": ({"evaluation.experiments": ["many"]}, *UNKNOWN),
    "unknown removals experiment": ({"evaluation.removals.experiment": "many"}, *UNKNOWN),
    "a question": (
        {"experiments.asked": {"data": "asked.tsv"}, "evaluation.experiments": ["asked"]},
        *("config.evaluated_question", "asked"),
    ),
    "questions alone": (
        {"experiments": {"asked": {"data": "asked.tsv"}}, "evaluation.removals": None},
        "config.no_own_targets",
    ),
    "removals for all": ({"experiments.few.targets": "all"}, "config.removals_of_all", "few"),
    "no training": ({"training": None}, "config.no_training", "evaluation.subsets"),
    "top_k": ({"scoring.keep": "top_k"}, "config.incomplete_scores", "top_k"),
    "no classes": (
        {"model_output": "regression"},
        *("config.no_classes", "same_class", "regression"),
    ),
    "exact": ({"projection": "exact"}, "config.evaluation_of_features", "evaluation.sweep"),
}


@pytest.mark.parametrize("name", BAD)
def test_evaluations_that_cannot_be(name):
    change, code, *values = BAD[name]
    config = copy.deepcopy(FULL)
    check_evaluation(config)
    for path, value in change.items():
        set_key(config, path, value)
    with refused(code, *values):
        check_evaluation(config)


@pytest.mark.parametrize(("dim", "kind"), [(16, "hadamard"), (33, "rademacher")])
def test_columns_that_the_projection_lacks(dim, kind):
    with refused("config.sweep_columns", "rademacher or normal", 32, dim, f"with {kind}"):
        check_columns(32, kind, {"sweep": {"proj_dim": [dim]}})


def test_evaluations_of_more_than_there_is():
    for n_removed in ([9, 150], [0.999]):
        with refused("config.too_many_removed", "below 150", "Found 150"):
            check_sizes({"removals": {"experiment": "few", "n_removed": n_removed}}, 150)
    with refused("config.subset_size", 0.006, "0 of 150"):
        check_sizes({"subsets": {"fraction": 0.006}}, 150)


def test_any_part_will_do_alone():
    """But for settings of scores, which only retrained models can tell apart."""
    for key, value in EVALUATION.items():
        beside = {"subsets": {}} if key == "sweep" else {}
        check_evaluation(FULL | {"evaluation": {"baselines": [], **beside, key: value}})

"""Checkpoints from along runs, under Snakemake: what is trained and averaged, what runs again."""

import copy

import h5py
import pandas as pd
import pytest
import yaml
from own_checkpoints import OWN
from refusals import check
from refused import refused
from workspace import Workspace, scoring

STUDY = """
from small_digits import *
from small_digits import _IDS

def train(seed, steps, data=None):
    torch.manual_seed(seed)
    model = make_model()
    images, labels = default_collate(list(train_data() if data is None else data))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step)
        yield step, model


def describe(sample):
    return f"a {sample[1]} of {round(sample[0].sum().item() / 10)} tens of ink"
"""
CONFIG = {
    "model_output": "image_classification",
    "training": {"steps": 6, "at": [2, 5]},
    "checkpoints": {"a": {"seed": 0}, "b": {"seed": 1, "at": [1, 3, 5]}, "c": {"seed": 2}},
    "experiments": {"few": {"targets": [1506, 1620, 744, 984, 210, 51]}},
    "projection": {"proj_dim": 32, "seed": 0},
    "scoring": {"top": 3},
    "evaluation": {
        "subsets": {"count": 4, "seeds": 2},
        "baselines": ["gradient_dot", "embedding_cosine", "bm25"],
        "self_influence": True,
    },
}


def train_along(folder):
    study = Workspace.make(folder, "small_digits.py", copy.deepcopy(CONFIG))
    study.path("along.py").write_text(STUDY)
    study.config["study"] = "along.py"
    once = (
        *("retrain_subsets", "compute_self_influence", "average_scores"),
        *("evaluate_scores", "draw_influences", "write_report_first", "write_report"),
    )
    assert study.run("all") == {
        # Runs with the same times share a rule; each is one job.
        **{"train_checkpoint": 2, "train_checkpoint_2": 1},
        **{"compute_features": 14, "compute_scores": 7, "compute_normal_matrix": 7},
        "compute_embeddings": 3,
        **dict.fromkeys(once, 1),
    }
    return study


@pytest.fixture(scope="module")
def along(built_once):
    return built_once("along", train_along)


@pytest.fixture
def study(along, tmp_path):
    return along.copy(tmp_path / "study")


def test_scores_are_unit_averages_of_checkpoints_from_different_times(along):
    """Their numbers, and which models tables and curves are of: tests/stages."""
    results = along.path("results")
    with h5py.File(results / "scores/few.h5") as file:
        said = file.attrs["defaults"].decode()
        assert (file.attrs["n_checkpoints"], file.attrs["n_runs"]) == (7, 3)
    assert "combine is unit_average, because checkpoints are from different times" in said
    page = " ".join(results.joinpath("report.html").read_text().split())
    assert said in page
    assert "7 checkpoint" in page
    assert "of 3 training runs" in page
    methods = pd.read_hdf(results / "evaluation/few.h5", "summary")["method"]
    assert {"ends_of_runs", "bm25", "embedding_cosine"} <= {*methods}


def test_another_time_trains_its_run_alone(study):
    study.config["checkpoints"]["c"]["at"] = [2, 4, 5]
    planned = study.would_run()
    # a and c no longer have the same times: a rule of its own, but no job of a's.
    assert sum(n for rule, n in planned.items() if rule.startswith("train_checkpoint")) == 1
    assert {k: n for k, n in planned.items() if not k.startswith("train")} == scoring(3, 1)
    assert study.run() == planned
    assert study.would_run() == {}


def test_a_training_without_yield_is_refused_before_any_job(study):
    study.config["study"] = "small_digits.py"
    with refused("config.preflight", "train() must yield (time, model)"):
        check(study, yaml.safe_dump(study.config).encode())


def test_runs_of_own_checkpoints_decide_averages_alone(own, tmp_path):
    study = own.copy(tmp_path / "study")
    paths = OWN["checkpoints"]
    study.config["scoring"] = {"combine": "average_of_products"}
    study.run()
    study.config["checkpoints"] = {
        c: {"path": path, "run": "one", "at": i} for i, (c, path) in enumerate(paths.items())
    }
    assert study.would_run() == {"average_scores": 2}
    del study.config["scoring"]
    # A table says the same.
    rows = [f"{c}\t{path}\tone\t{10 * i}" for i, (c, path) in enumerate(paths.items())]
    study.path("table.tsv").write_text("\n".join(["checkpoint\tpath\trun\tat", *rows, ""]))
    study.config["checkpoints"] = "table.tsv"
    assert study.would_run() == {
        "compute_normal_matrix": 3,
        "compute_scores": 6,
        "average_scores": 2,
    }


def test_the_report_is_a_target_of_its_own(study):
    assert study.would_run("report") == {}
    study.path("results/report.html").unlink()
    assert study.would_run("report") == {"write_report": 1}

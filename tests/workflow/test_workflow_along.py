"""Checkpoints from along runs, under Snakemake: what is trained and averaged, what runs again."""

import copy

import h5py
import numpy as np
import pandas as pd
import pytest
import yaml
from lds import features_of, lds_of
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
ALONG = [
    f"{run}-{at}" for run, times in (("a", (2, 5)), ("b", (1, 3, 5)), ("c", (2, 5))) for at in times
]


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


def term(results, checkpoint):
    """What one checkpoint adds to a unit average."""
    with h5py.File(results / f"scores/few/{checkpoint}.h5") as file:
        similarities = file["similarities/block0_values"][:].astype(float)
        weights = file["loss_weights"][:].astype(float) ** 0.75
        return similarities * weights[:, None] / file["train_norm"][()]


def test_scores_are_unit_averages_of_all_checkpoints(along):
    results = along.path("results")
    terms = [term(results, c) for c in ALONG]
    found = pd.read_hdf(results / "scores/few.h5", "scores").to_numpy()
    assert np.abs(found - np.mean(terms, axis=0)).max() < 1e-6 * np.abs(found).max()
    with h5py.File(results / "scores/few.h5") as file:
        said = file.attrs["defaults"].decode()
        assert (file.attrs["n_checkpoints"], file.attrs["n_runs"]) == (7, 3)
    assert "combine is unit_average, because checkpoints are from different times" in said
    page = " ".join(results.joinpath("report.html").read_text().split())
    assert said in page
    assert "7 checkpoint" in page
    assert "of 3 training runs" in page


def test_what_models_say_is_what_they_say_at_the_end(along):
    results = along.path("results")
    for table, split in (("targets", "few"), ("train", "train")):
        outputs = []
        for c in ("a-5", "b-5", "c-5"):
            with h5py.File(results / f"features/{c}/{split}.h5") as file:
                outputs.append(file["outputs"][:])
        found = pd.read_hdf(results / "scores/few.h5", table)
        np.testing.assert_allclose(found["output"], np.mean(outputs, axis=0), rtol=1e-5)
        np.testing.assert_allclose(found["output_sd"], np.std(outputs, axis=0), rtol=1e-4)
    found = pd.read_hdf(results / "self_influence.h5", "train")["output"]
    np.testing.assert_allclose(found, np.mean(outputs, axis=0), rtol=1e-5)


def test_an_evaluation_says_what_being_along_gains(along):
    summary = pd.read_hdf(along.path("results/evaluation/few.h5"), "summary").set_index("method")
    curve = pd.read_hdf(along.path("results/evaluation/few.h5"), "checkpoints")
    assert curve["n_checkpoints"].tolist() == [1, 2, 3, 5, 7]
    baselines = dict.fromkeys(
        ("ends_of_runs", "gradient_dot", "embedding_cosine", "bm25"), "baseline"
    )
    kinds = {"scores": "scores", **baselines, "noise_ceiling": "ceiling"}
    assert summary["kind"].to_dict() == kinds
    assert summary.loc["scores", "behind"] == 0
    lds = summary["lds"]
    np.testing.assert_allclose(summary["behind"], lds["scores"] - lds, atol=1e-12)
    assert lds["scores"] == curve["lds"].iloc[-1]
    # The first three are one of each run, of different times.
    results = along.path("results")
    first = np.mean([term(results, c) for c in ("a-5", "b-3", "c-5")], axis=0)
    assert abs(curve["lds"][2] - lds_of(results, first, "0-3")) < 1e-9
    assert abs(lds["ends_of_runs"] - lds_of_ends(results)) < 1e-9


def lds_of_ends(results):
    """Of the last checkpoints, by TRAK's average, damped: dense matrices and ranks of SciPy."""
    similarities, weights = 0, 0
    for c in ("a-5", "b-5", "c-5"):
        phi, targets = features_of(results, c)
        shift = 2 * np.mean((phi**2).sum(1)) * np.eye(32)
        similarities = similarities + phi @ np.linalg.solve(phi.T @ phi + shift, targets.T)
        with h5py.File(results / f"scores/few/{c}.h5") as file:
            weights = weights + file["loss_weights"][:].astype(float)[:, None] ** 0.5
    return lds_of(results, similarities * weights, "0-3")


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
    assert study.run() == {"compute_normal_matrix": 3, "compute_scores": 6, "average_scores": 2}
    with h5py.File(study.path("results/scores/few.h5")) as file:
        assert file.attrs["combine"] == b"unit_average"
        assert file.attrs["n_runs"] == 1
    targets = pd.read_hdf(study.path("results/scores/few.h5"), "targets")
    assert (targets["output_sd"] == 0).all()


def test_the_report_is_a_target_of_its_own(study):
    assert study.would_run("report") == {}
    study.path("results/report.html").unlink()
    assert study.would_run("report") == {"write_report": 1}

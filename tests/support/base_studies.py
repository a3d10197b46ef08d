"""Studies that many tests start from: the first worker of pytest-xdist that asks runs one for all.

Tests read them, and run Snakemake in copies of them alone.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from own_checkpoints import own_study
from running import small_study
from workspace import Workspace, jobs, scoring

TRAINED = {
    "model_output": "image_classification",
    "training": {"steps": 5},
    "checkpoints": {f"c{i}": {"seed": i} for i in range(3)},
    # Six targets, since five share a job that retrains without what helped them.
    "experiments": {
        "few": {"targets": [1506, 1620, 744, 984, 210, 51]},
        "one": {"targets": [1506]},
    },
    "projection": {"proj_dim": 32, "seed": 0},
    "scoring": {"damping": 2, "top": 3},
}
EVALUATION = {
    # Two more than share a job.
    "subsets": {"count": 27, "seeds": 2},
    "baselines": ["random", "same_class", "gradient_dot", "embedding_cosine"],
    "sweep": {"damping": [1], "proj_dim": [16]},
    "self_influence": True,
    "removals": {
        **{"experiment": "few", "targets": 6, "baselines": ["embedding_cosine"]},
        "drop": {"fractions": [0.05], "seeds": 2},
    },
}


def built_once(
    factory: pytest.TempPathFactory, name: str, build: Callable[[Path], Workspace]
) -> Workspace:
    """Return the study that ``build`` makes and runs in the folder it is given."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder = base / "base-studies" / name
    folder.parent.mkdir(exist_ok=True)
    finished = folder.with_suffix(".json")
    with FileLock(folder.with_suffix(".lock")):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a build that failed left
            finished.write_text(json.dumps(build(folder).config))
    return Workspace(folder, json.loads(finished.read_text()))


def train_and_score(folder: Path) -> Workspace:
    study = Workspace.make(folder, "small_digits.py", copy.deepcopy(TRAINED))
    beside = {"train_checkpoint": 3, "draw_influences": 2, "write_report": 1}
    assert study.run("all") == scoring(3, 2) | beside
    return study


def evaluate(trained: Workspace, folder: Path) -> Workspace:
    study = trained.copy(folder)
    del study.config["checkpoints"]["c2"], study.config["experiments"]["one"]
    study.config |= {"evaluation": copy.deepcopy(EVALUATION), "groups": ["label"]}
    study.config["lists"] = ["drop"]
    status, output = study.snakemake("all")
    assert status == 0, output
    assert "\nGroups: results/groups/few.h5\n" in output
    assert jobs(output) == {
        "average_scores": 1,
        "draw_influences": 1,
        "write_report_first": 1,
        "retrain_subsets": 3,
        "compute_embeddings": 2,
        "evaluate_scores": 1,
        "compute_self_influence": 1,
        # Random ones, two groups by scores and two by embeddings, two draws of a list.
        "retrain_removals": 7,
        "compare_removals": 2,
        "sum_groups": 1,
        "write_list": 1,
        "show_list": 1,
        "write_report": 1,
    }
    return study


def score_own(folder: Path) -> Workspace:
    study = own_study(folder)
    assert study.run() == scoring(3, 2)
    return study


def undisturbed(folder: Path) -> Workspace:
    study = small_study(folder)
    study.run()
    return study

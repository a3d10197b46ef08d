"""A study whose networks the pipeline trains: what a change would run again, as Snakemake plans it.

What a plan promises is seen once for real in test_workflow_own.py; here for real are a kill and a
run on one core. Shards are in test_faults.py.
"""

import os
import signal
import sys
import time

import pytest
import torch
from base_studies import TRAINED
from running import Running
from workspace import Workspace, scoring, set_key


@pytest.fixture
def study(trained, tmp_path):
    return trained.copy(tmp_path / "study")


def test_a_second_run_has_nothing_to_do(study):
    assert study.run("all") == {}  # not a plan alone
    # Nor has one after changes that decide no numbers.
    study.config["checkpoints"] = dict(reversed(study.config["checkpoints"].items()))
    study.config["scoring"] = dict(reversed(study.config["scoring"].items()))
    study.config["compute"] = {"batch_size": 7, "memory_mb": 200, "threads": 2}
    # An interpreter of its own has other hashes, and so another order of sets.
    status, output = study.snakemake("-n", "all", python=sys.executable)
    assert status == 0, output
    assert "Nothing to be done" in output


def test_values_on_the_command_line_are_those_of_a_file(study):
    given = ("projection={proj_dim: 32, seed: 0}", "training={steps: 5}", "results=results")
    targets = "experiments={one: {targets: [1506]}}"
    assert study.would_run("all", "--config", *given, targets) == {}
    planned = study.would_run("all", "--config", "scoring={damping: 3}")
    assert planned["compute_scores"] == 6


def test_a_trained_checkpoint_that_changed(study):
    path = study.path("results/checkpoints/c1.pt")
    state = torch.load(path, weights_only=True)
    time.sleep(0.01)
    torch.save({k: v * 2 for k, v in state.items()}, path)
    assert study.would_write() == {
        *(f"features/c1/{split}.h5" for split in ("train", "few", "one")),
        "normal_matrix/c1.h5",
        *(f"scores/{name}.h5" for name in ("few/c1", "one/c1", "few", "one")),
    }


ONE_EXPERIMENT = {"compute_features": 3, "compute_scores": 3, "average_scores": 1}
# Another damping, other targets, a checkpoint less: for real, in test_workflow_own.py. Which
# settings decide which files: library/test_specs.py.
CHANGES = {
    "a checkpoint added": ("checkpoints.c3", {"seed": 3}, {"train_checkpoint": 1, **scoring(1, 2)}),
    "top influences": ("scoring.top", 2, {"average_scores": 2}),
    "an experiment added": ("experiments.new", {"targets": [1620]}, ONE_EXPERIMENT),
    "shards of one split": (
        "experiments.few.shards",
        2,
        {"compute_features_shard": 6, "join_shards": 3, "compute_scores": 3, "average_scores": 1},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_change_of_the_config_runs_again(study, name):
    path, value, rules = CHANGES[name]
    set_key(study.config, path, value)
    assert study.would_run() == rules


def test_a_module_edited_and_files_touched(study):
    """That a digest is of all imports: test_dispatch.py, test_dependency_digests.py.

    Snakemake compares the content of files below 1 MB: touching those reruns nothing.
    """
    study.take_code()
    touched = [*study.path("results/checkpoints").iterdir(), *study.path("trak_core").rglob("*.py")]
    touched += [study.path("small_digits.py"), study.path("Snakefile")]
    for path in [*touched, *study.path("workflow/scripts").iterdir()]:
        path.touch()
    assert study.would_run("all") == {}
    edited = study.path("trak_core/stages/compute_scores.py")
    edited.write_text(f"{edited.read_text()}\n# a comment\n")
    shown = {"draw_influences": 2, "write_report": 1}
    solved = {"compute_normal_matrix": 3, "compute_scores": 6, "average_scores": 2}
    assert study.would_run("all") == solved | shown


def test_a_killed_run_goes_on_after_unlock(trained, tmp_path):
    """SIGKILL for Snakemake and all its jobs, in the midst of featurization.

    It began on two cores and goes on on one, to the bytes of a run that nothing disturbed.
    """
    study = Workspace.make(tmp_path / "killed", "small_digits.py", TRAINED)
    running = Running(study, "--cores", "2", "all")
    # The last one or two may not be in the records yet; those run again, to the same bytes.
    running.wait_for(lambda: len(list(study.path("results").glob("features/*/*.h5"))) >= 4)
    os.killpg(running.process.pid, signal.SIGKILL)
    running.finish()
    finished = study.artifacts()
    assert 0 < len(finished) < 22

    assert "--unlock" in study.fail()
    assert study.snakemake("--unlock")[0] == 0
    counts = study.run("--cores", "1", "all")
    assert counts["compute_features"] < 9
    found, expected = study.artifacts(), trained.artifacts()
    assert {name: found[name] for name in finished} == finished
    assert len(expected) == 22
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    for name in ("few", "one"):
        shown = f"results/answers/{name}.html"
        assert study.path(shown).read_bytes() == trained.path(shown).read_bytes()
    report = "results/report.html"
    assert study.path(report).read_bytes() == trained.path(report).read_bytes()

"""docs/how-to/clusters.md: files in a store, and nodes that share no disk with Snakemake."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from base_studies import TRAINED
from own_checkpoints import own_study, save_own_checkpoint
from pages import blocks
from refused import refused
from stores import s3_server, write_scheduler
from workspace import REPOSITORY, artifacts_in, as_a_module, jobs, scoring

from trak_core.config.preflight import bring_along

# The page's commands, each by an option that it alone has.
COMMANDS = [
    shlex.split(line)
    for language, text in blocks("docs/how-to/clusters.md")
    if language == "console"
    for line in re.findall(r"^\$ \.venv/bin/snakemake (.*)", text, flags=re.M)
]
AGAIN = scoring(1, 1)  # of one checkpoint


def options(*words):
    """The options of the page's one command with these words, but for the config's."""
    (command,) = (command for command in COMMANDS if set(words) <= set(command))
    i = command.index("--configfile")
    return [*command[:i], *command[i + 2 :]]


@pytest.fixture(scope="module")
def s3():
    with s3_server("my-bucket") as running:
        yield running


@pytest.fixture
def in_environment(s3, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


def two_checkpoints(folder):
    return own_study(folder, 2, ["few"])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The study run on this disk."""
    study = two_checkpoints(tmp_path_factory.mktemp("local") / "study")
    study.run()
    return study


@pytest.mark.skipif(shutil.which("rsync") is None, reason="runs where rsync is installed")
def test_a_folder_as_a_store(local, tmp_path):
    study = two_checkpoints(tmp_path / "study")
    store = tmp_path / "store"
    # The copies that stay here don't count.
    shutil.copytree(study.path("mine"), store / "mine")
    arguments = [a.replace("/mnt/my-store", str(store)) for a in options("fs")]
    assert str(store) in arguments
    assert study.run("scores", *arguments) == scoring(2, 1)
    assert artifacts_in(store / "results") == local.artifacts()
    kept = {path.name for path in study.path("results").iterdir()}
    assert kept - {"checkpoints.json"} == {"study.json"}
    assert study.would_run("scores", *arguments) == {}
    # An older file in its place: no newer than the results, but not the one they were made of.
    weights = store / "mine/c1.pt"
    save_own_checkpoint(study, 1, scale=2).rename(weights)
    os.utime(weights, (1e9, 1e9))
    assert study.would_run("scores", *arguments) == AGAIN
    # A folder counts by every file in it.
    weights.rename(store / "weights")
    weights.mkdir()
    (store / "weights").rename(weights / "pytorch_model.bin")
    assert study.run("scores", *arguments) == AGAIN
    assert study.would_run("scores", *arguments) == {}
    (weights / "notes.txt").write_text("new")
    assert study.would_run("scores", *arguments) == AGAIN
    (store / "mine/c1.pt").rename(store / "mine/c7.pt")
    output = study.fail("--dry-run", "scores", *arguments)
    assert re.search(r"c1\.pt: the file must exist\. Found nothing at /.*/store/mine/c1", output)


def test_checkpoints_in_a_store(s3, in_environment, local, tmp_path):
    study = two_checkpoints(tmp_path / "study")
    for name, path in study.config["checkpoints"].items():
        s3.put(study.path(path), f"runs/{name}.pt")
        study.config["checkpoints"][name] = f"s3://my-bucket/runs/{name}.pt"
    shutil.rmtree(study.path("mine"))
    assert sum(study.run().values()) == 9
    assert study.artifacts() == local.artifacts()
    assert study.would_run() == {}
    s3.put(save_own_checkpoint(study, 1, scale=2), "runs/c1.pt")
    assert study.would_run() == AGAIN


STUDY_BESIDE = """
from pathlib import Path
from diabetes import make_model, target_data, target_ids, train_data
assert Path("data/words.txt").read_text() == "as on the first machine"
"""


def without_a_disk(folder):
    """A study in a folder with the workflow, which git knows, and a scheduler's commands."""
    study = own_study(folder, 1, ["few"])
    shutil.copytree(REPOSITORY / "workflow", folder / "workflow")
    study.snakefile = "workflow/Snakefile"
    for arguments in (("init", "--quiet"), ("add", "workflow")):
        subprocess.run(("git", *arguments), cwd=folder, check=True)
    return study, write_scheduler(folder)


def test_nodes_that_share_no_disk(s3, in_environment, tmp_path):
    study, nodes = without_a_disk(tmp_path / "study")
    # Not in git: a study with a module beside it, data, a table of targets.
    study.path("studies").mkdir()
    study.path("data").mkdir()
    study.path("data/words.txt").write_text("as on the first machine")
    study.path("studies/targets.tsv").write_text("id\npatient-342\npatient-400\n")
    study.path("diabetes.py").rename(study.path("studies/diabetes.py"))
    study.path("studies/mine.py").write_text(STUDY_BESIDE)
    study.config["study"] = "studies/mine.py"
    study.config["data_files"] = ["data"]
    study.config["experiments"]["few"]["targets"] = "studies/targets.tsv"
    assert sum(study.run("all").values()) == 7
    local = study.artifacts()
    shutil.rmtree(study.path("results"))
    shutil.rmtree(study.path(".snakemake"))

    for path in study.config["checkpoints"].values():
        s3.put(study.path(path), f"my-study/{path}")
    shutil.rmtree(study.path("mine"))
    arguments = (*options("--executor"), "--seconds-between-status-checks", "1")
    found = study.run("all", *arguments)
    assert found == {**AGAIN, "draw_influences": 1, "write_report": 1}
    assert len(list(nodes.iterdir())) == sum(found.values())
    stored = s3.files("my-study/results/")
    assert {name: text for name, text in stored.items() if name.endswith(".h5")} == local
    assert study.would_run("all", *arguments) == {}
    s3.put(save_own_checkpoint(study, 0, scale=2), "my-study/mine/c0.pt")
    drawn = {"draw_influences": 1, "write_report": 1}
    assert study.would_run("all", *arguments) == AGAIN | drawn
    # This machine can go on with it.
    here = options("s3", "--cores")
    assert study.run("scores", *here) == AGAIN
    assert study.would_run("scores", *here) == {}


def test_training_where_no_disk_is_shared(s3, in_environment, tmp_path):
    study, nodes = without_a_disk(tmp_path / "study")
    shutil.copy(REPOSITORY / "tests/studies/small_digits.py", study.folder)
    study.config = {
        **TRAINED,
        "study": "small_digits.py",
        "checkpoints": {"c0": {"seed": 0}},
        "experiments": {"few": {"targets": [1506, 1620], "shards": 2}},
    }
    arguments = [option.replace("my-study", "trained") for option in options("--executor")]
    found = study.run("all", *arguments, "--seconds-between-status-checks", "1")
    again = ("compute_scores", "average_scores", "draw_influences", "write_report")
    once = ("train_checkpoint", "compute_features", "join_shards", "compute_normal_matrix", *again)
    assert found == {"compute_features_shard": 2, **dict.fromkeys(once, 1)}
    assert len(list(nodes.iterdir())) == sum(found.values())
    assert study.would_run("all", *arguments) == {}
    study.config["scoring"] = {**study.config["scoring"], "damping": 1}
    assert study.would_run("all", *arguments) == dict.fromkeys(again, 1)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="runs where rsync is installed")
def test_a_module_with_a_prefix_and_a_store(tmp_path):
    """The prefix moves what the workflow writes, and nothing of a user's."""
    study, store = two_checkpoints(tmp_path / "study"), tmp_path / "store"
    study.path("mine").rename(store)
    study.config["checkpoints"] = {"c0": "c0.pt"}
    study.path("Snakefile").write_text(as_a_module("in/it"))
    study.snakefile = "Snakefile"
    arguments = [a.replace("/mnt/my-store", str(store)) for a in options("fs")]
    _, planned = study.snakemake("trak_scores", *arguments, "--dry-run")
    assert jobs(planned) == {"trak_scores": 1, **{f"trak_{rule}": n for rule, n in AGAIN.items()}}
    assert "store/in/it/results/scores/few.h5" in planned
    assert study.path("in/it/results/study.json").exists()


def test_what_cannot_come_along(tmp_path, monkeypatch):
    """Snakemake would warn only, and every job would die."""
    study, _ = without_a_disk(tmp_path / "study")
    shutil.copy(study.path("diabetes.py"), tmp_path / "elsewhere.py")
    study.config["study"] = "../elsewhere.py"
    arguments = ("--dry-run", *options("--executor"))
    refusal = r"must be in the working folder\. This is not true for \.\./elsewhere\.py"
    assert re.search(refusal, study.fail(*arguments))
    monkeypatch.chdir(study.folder)
    with Path("large.bin").open("wb") as file:
        file.truncate(10_000_001)
    with refused("config.sources", "10 MB", "large.bin"):
        bring_along([Path("diabetes.py"), Path("large.bin")])

"""`snakemake --profile slurm` on real SLURM daemons gives the files that a local run gives."""

import re
import subprocess
import sys
import time

import pytest
import slurm_cluster
import yaml
from workspace import REPOSITORY, Workspace

pytestmark = pytest.mark.skipif(
    slurm_cluster.missing() is not None, reason=f"no SLURM: {slurm_cluster.missing()}"
)

# Snakemake's first look at its jobs; 40 seconds are kinder to a real scheduler.
SLURM = ("--profile", "slurm", "--slurm-init-seconds-before-status-checks", "4")
SMALL = {
    "model_output": "image_classification",
    "training": {"steps": 5},
    "checkpoints": {"c0": {"seed": 0}, "c1": {"seed": 1}},
    "experiments": {"few": {"targets": [1506, 1620]}},
    "projection": {"proj_dim": 32},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


def start(workspace, *arguments):
    """Start Snakemake on the cluster, its output in a file."""
    workspace.path("study.yaml").write_text(yaml.safe_dump(workspace.config, sort_keys=False))
    with workspace.path("slurm.log").open("w") as log:
        return subprocess.Popen(
            (sys.executable, "-m", "snakemake", *SLURM, *arguments, "--configfile", "study.yaml"),
            cwd=workspace.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish(workspace, process):
    process.wait(timeout=400)
    output = workspace.path("slurm.log").read_text()
    assert process.returncode == 0, output
    return output


def wait_for_job(cluster, workspace, process, rule):
    """Return id and node of a job of this rule once it runs, as the log and squeue tell."""
    for _ in range(600):
        assert process.poll() is None, workspace.path("slurm.log").read_text()
        log = workspace.path("slurm.log").read_text()
        of_rule = re.findall(rf"SLURM jobid (\d+) \(log: \S*rule_{rule}/", log)
        for job, state, node in cluster.queue():
            if job in of_rule and state == "RUNNING":
                return job, node
        time.sleep(0.2)
    raise AssertionError(f"no {rule} ran:\n{log}")


def test_the_smoke_study_gives_the_files_of_a_local_run(cluster, tmp_path):
    config = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    config |= {"study": str(REPOSITORY / "config/digits.py"), "results": "results"}
    study = config.pop("study")
    # Of the evaluation's rules the ones that begin and end it: the others would take minutes here.
    config["evaluation"] = {"subsets": {"count": 4, "seeds": 1}}
    local = Workspace.make(tmp_path / "local", "small_digits.py", config)
    remote = Workspace.make(tmp_path / "remote", "small_digits.py", config)
    local.config["study"] = remote.config["study"] = study
    output = finish(remote, start(remote))
    jobs = len(re.findall(r"has been submitted with SLURM jobid", output))
    # Three trainings and nine featurizations, three for the evaluation, and the report; matrices
    # and scores, averages and figures in groups.
    assert jobs < 3 + 9 + 3 + 1 + 6, output
    local.run("all")
    expected, found = local.artifacts(), remote.artifacts()
    assert len(expected) == 20 + 1 + 2
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert remote.run("all") == {}


def test_a_cancelled_job_and_a_lost_node_cost_no_finished_file(cluster, tmp_path):
    undisturbed = Workspace.make(tmp_path / "undisturbed", "small_digits.py", SMALL)
    undisturbed.run()
    study = Workspace.make(tmp_path / "study", "small_digits.py", SMALL)
    process = start(study, "scores")
    job, _ = wait_for_job(cluster, study, process, "train_checkpoint")
    cluster.cancel(job)
    job, node = wait_for_job(cluster, study, process, "compute_features")
    cluster.kill_node(node)
    time.sleep(1)
    cluster.start_node(node)
    while process.poll() is None:
        cluster.start_requeued_now()
        time.sleep(2)
    finish(study, process)
    assert study.artifacts() == undisturbed.artifacts()
    assert not list(study.path("results").rglob(".*.part"))


SHOWS_ITS_GPU = """
import os
print("CUDA_VISIBLE_DEVICES is", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
"""


def test_each_job_that_takes_gradients_gets_a_gpu_and_no_other_does(cluster, tmp_path):
    """The GPUs are pretended, so that torch finds none: `auto` takes the CPU, and says so."""
    config = {**SMALL, "checkpoints": {"c0": {"seed": 0}}, "compute": {"device": "auto"}}
    study = Workspace.make(tmp_path / "study", "small_digits.py", config)
    path = study.path("small_digits.py")
    path.write_text(path.read_text() + SHOWS_ITS_GPU)
    files = [f"results/features/c0/{split}.h5" for split in ("train", "few")]
    finish(study, start(study, "--profile", "slurm-gpu", *files))
    for split in ("train", "few"):
        log = study.path(f"results/logs/compute_features/c0/{split}.log").read_text()
        assert re.search(r"^CUDA_VISIBLE_DEVICES is [01]$", log, flags=re.M), log
        assert "gradients on cpu" in log
    log = study.path("results/logs/train_checkpoint/c0.log").read_text()
    assert not re.search(r"CUDA_VISIBLE_DEVICES is \d", log), log

"""`snakemake --profile slurm` on real SLURM daemons gives the files that a local run gives."""

import os
import re
import subprocess
import time
from collections import Counter, defaultdict

import pytest
import slurm_cluster
import yaml
from workspace import REPOSITORY, Workspace, forked_python

pytestmark = pytest.mark.skipif(
    slurm_cluster.missing() is not None, reason=f"no SLURM: {slurm_cluster.missing()}"
)

SLURM = (
    *("--profile", str(REPOSITORY / "slurm"), "--profile", str(REPOSITORY / "slurm-gpu")),
    # When Snakemake looks at its jobs, which then are done: the next look comes 10 seconds later
    # than this one did. 40 seconds are kinder to a real scheduler.
    *("--slurm-init-seconds-before-status-checks", "7"),
    "--slurm-keep-successful-logs",
)
# Run by every Python that starts, before the job's own log is opened: goes to SLURM's.
SHOWS_ITS_GPU = """
import os, sys
print("CUDA_VISIBLE_DEVICES is", os.environ.get("CUDA_VISIBLE_DEVICES"), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(scope="session")
def local(built_once, trained):
    """The small study that the cluster gets, run here."""

    def run(folder):
        study = trained.copy(folder)
        del study.config["checkpoints"]["c2"], study.config["experiments"]["one"]
        # Of the evaluation's rules the ones that begin and end it: others would take minutes there.
        study.config["evaluation"] = {"subsets": {"count": 4}}
        measured = ("retrain_subsets", "evaluate_scores", "write_report_first", "write_report")
        assert study.run("all") == dict.fromkeys(
            ("average_scores", "draw_influences", *measured), 1
        )
        # The GPUs of the nodes are pretended, so that torch finds none there, and takes the CPU.
        study.config["compute"] = {"device": "auto"}
        return study

    return built_once("local", run)


def start(workspace):
    """Start Snakemake on the cluster, its output in a file."""
    customized = workspace.path("customized")
    customized.mkdir()
    (customized / "sitecustomize.py").write_text(SHOWS_ITS_GPU)
    workspace.path("study.yaml").write_text(yaml.safe_dump(workspace.config, sort_keys=False))
    with workspace.path("slurm.log").open("w") as log:
        return subprocess.Popen(
            (
                *(forked_python(), "-m", "snakemake", "--snakefile", workspace.snakefile),
                *(*SLURM, "--configfile", "study.yaml"),
            ),
            env={**os.environ, "PYTHONPATH": str(customized)},
            cwd=workspace.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


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


def test_a_study_gives_the_files_of_a_local_run(cluster, local, tmp_path):
    """Though a job is cancelled and a node is lost meanwhile; gradients get a GPU each."""
    study = Workspace.make(tmp_path / "study", "small_digits.py", local.config)
    process = start(study)
    job, _ = wait_for_job(cluster, study, process, "train_checkpoint")
    cluster.cancel(job)
    job, node = wait_for_job(cluster, study, process, "compute_features")
    cluster.kill_node(node)
    time.sleep(1)
    cluster.start_node(node)
    while process.poll() is None:
        cluster.start_requeued_now()
        time.sleep(2)
    output = study.path("slurm.log").read_text()
    assert process.returncode == 0, output
    logs = re.findall(r"submitted with SLURM jobid \d+ \(log: \S*/slurm_logs/(\w+)/", output)
    jobs = Counter(logs)
    # The cancelled job comes once more, and the one that was on the node once more at most.
    assert jobs.pop("rule_train_checkpoint") in {2 + 1, 2 + 2}, output
    assert jobs.pop("rule_compute_features") in {4, 4 + 1}, output
    # Matrices and scores, average and page, six in all, in groups; evaluation and reports.
    assert sum(jobs[job] for job in jobs if job.startswith("group_")) <= 3, output
    once = ("retrain_subsets", "evaluate_scores", "write_report_first", "write_report")
    rules = {job: n for job, n in jobs.items() if job.startswith("rule_")}
    assert rules == dict.fromkeys((f"rule_{rule}" for rule in once), 1), output
    found, expected = study.artifacts(), local.artifacts()
    assert len(found) == 9 + 1 + 1 + 1
    assert [name for name in found if found[name] != expected[name]] == []
    assert not list(study.path("results").rglob(".*.part"))
    assert study.run("all") == {}
    gpus = defaultdict(list)
    for log in study.path(".snakemake/slurm_logs").rglob("*.log"):
        rule = log.relative_to(study.path(".snakemake/slurm_logs")).parts[0]
        gpus[rule] += [re.findall(r"^CUDA_VISIBLE_DEVICES is ([01])$", log.read_text(), flags=re.M)]
    assert set(gpus) >= set(logs)
    # One that was on the lost node may not have come far enough to say.
    assert sum(bool(seen) for seen in gpus.pop("rule_compute_features")) >= 4
    assert not any(seen for of_rule in gpus.values() for seen in of_rule)
    log = study.path("results/logs/compute_features/c0/train.log").read_text()
    assert "gradients on cpu" in log

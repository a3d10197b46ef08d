"""Runs that are killed, stopped or started twice lose no finished file and give equal scores."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pandas as pd
import patience
import pytest
import yaml
from no_locks import needs_compiler, without_locks
from own_checkpoints import own_study
from running import Running

from trak_core.artifacts import FEATURES, open_artifact

TRAIN = "results/features/c0/train.h5"
TRAIN_LOG = "results/logs/compute_features/c0/train.log"


@pytest.fixture
def study(finished, tmp_path):
    return finished.copy(tmp_path / "study")


def state(path):
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, path.read_bytes()


def leftovers(study):
    return list(study.path("results").rglob(".*.part"))


def in_log(log, text):
    return log.exists() and text in log.read_text()


def check_same_scores(*studies):
    pair = [pd.read_hdf(study.path("results/scores/few.h5"), "scores") for study in studies]
    assert np.array_equal(*pair)


# A visible event of a job, and the largest number of seconds after it until the job is killed.
MOMENTS = [
    ("started", 0.8),
    ("log", 1.0),
    ("samples at once", 0.1),
    ("partial", 0.1),
    ("342/342 samples", 0.005),
    ("final name", 0),
]


def test_six_kills_of_a_job_cost_no_finished_file(study, finished, tmp_path):
    """SIGKILL from the imports to the rename; Snakemake starts the job again each time."""
    target, log = study.path(TRAIN), study.path(TRAIN_LOG)
    for gone in (TRAIN, "results/normal_matrix/c0.h5", "results/scores/few/c0.h5"):
        study.path(gone).unlink()
    study.path("results/scores/few.h5").unlink()
    log.unlink()
    kept = [study.path("results/features/c0/few.h5"), study.path("mine/c0.pt")]
    before = [state(path) for path in kept]
    seen = {
        "started": lambda: True,
        "log": log.exists,
        "partial": lambda: list(target.parent.glob(".train.h5.*.part")),
        "final name": target.exists,
    }
    rng = random.Random(0)
    running = Running(study, "--retries", str(len(MOMENTS)), "scores")
    for number, (moment, most_seconds) in enumerate(MOMENTS):
        job = running.next_job("compute_features")
        running.wait_for(seen.get(moment, partial(in_log, log, moment)))
        time.sleep(rng.uniform(0, most_seconds))
        assert job.is_running(), f"{moment}: the job was faster than its kill"
        # Snakemake deletes the output of a failed job at once, so keep it under another name.
        copy = tmp_path / f"{number}.h5"
        try:
            os.link(target, copy)
        except FileNotFoundError:
            assert moment != "final name"
        job.kill()
        if copy.exists():
            with open_artifact(copy, FEATURES):
                pass
    assert running.finish() == 0, running.output
    assert running.output.count("Trying to restart job") == len(MOMENTS)
    assert study.artifacts() == finished.artifacts()
    assert [state(path) for path in kept] == before
    assert leftovers(study) == []


def test_shards_that_are_done_stay_when_snakemake_is_told_to_stop(study, finished):
    """SIGTERM to Snakemake alone, as before a preemption: it waits for its job."""
    study.config["compute"]["shards"] = 3
    running = Running(study, "scores")
    running.next_job("compute_features")
    running.process.terminate()
    assert running.finish() == 1
    folder = study.path("results/shards/c0/train")
    assert len(list(folder.glob("*.h5"))) == 1
    assert leftovers(study) == []
    once = ("join_shards", "compute_normal_matrix", "compute_scores", "average_scores")
    assert study.run() == {"compute_features_shard": 2, **dict.fromkeys(once, 1)}
    assert not list(folder.glob("*.h5"))  # joined
    assert study.would_run() == {}
    check_same_scores(study, finished)


def test_ctrl_c_ends_in_what_is_kept_and_how_to_go_on(study, finished):
    """SIGINT to Snakemake and all that it started, as a terminal sends it."""
    study.config["compute"]["shards"] = 3
    folder = study.path("results/shards/c0/train")
    running = Running(study, "scores")
    (done,) = running.wait_for(lambda: list(folder.glob("*.h5")))
    begun = running.wait_for(lambda: list(folder.glob(".*.part")))
    before = state(done)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.finish() != 0
    assert running.output.splitlines()[-2:] == [
        "Stopping after Ctrl-C: waiting for jobs to clean up.",
        "Stopped by Ctrl-C. Finished files are kept in results, and unfinished files were deleted. "
        "To continue, run the same command again.",
    ]
    assert "Traceback" not in running.output
    assert "Error" not in running.output
    number = re.match(r"\.(\d-of-3)\.h5\.", begun[0].name)[1]
    log = study.path(f"results/logs/compute_features/c0/train/{number}.log").read_text()
    assert "\nError: the job was stopped by SIGINT, which Ctrl-C sends" in f"\n{log}"
    assert "Traceback" not in log
    assert leftovers(study) == []
    assert state(done) == before
    assert study.run()["compute_features_shard"] == 2  # the folder is not locked
    check_same_scores(study, finished)


def test_another_ctrl_c_ends_the_waiting_without_a_trace(study):
    """The job is suspended, so that it cannot delete its file."""
    study.config["projection"]["seed"] = 1
    running = Running(study, "results/features/c0/few.h5")
    job = running.next_job("compute_features")
    job.suspend()
    os.killpg(running.process.pid, signal.SIGINT)
    running.wait_for(lambda: "Stopping after Ctrl-C" in running.output)
    time.sleep(patience.longer(1))  # Snakemake begins to wait after this line is written
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.finish() != 0
    assert "Traceback" not in running.output
    assert "Finished files are kept in results" in running.output.splitlines()[-1]
    job.wait(20)
    assert study.run("results/features/c0/few.h5") == {"compute_features": 1}


def test_two_runs_with_one_results_folder(study, tmp_path):
    """Each in a folder of its own, so that Snakemake's own lock is not in the way."""
    study.config["projection"]["seed"] = 1
    other = study.copy(tmp_path / "other")
    other.config["results"] = str(study.path("results"))
    first = Running(study, "results/features/c0/few.h5")
    job = first.next_job("compute_features")
    job.suspend()
    target = f"{other.config['results']}/features/c0/few.h5"
    record = study.path("results/config.json").read_bytes()
    assert b'"seed": 1' in record
    output = other.fail(target)
    assert re.search(r"Error: /.*/study/results: only one run at a time may write", output)
    assert "Traceback" not in output
    other.would_run(target)  # which writes nothing
    assert study.path("results/config.json").read_bytes() == record
    job.resume()
    assert first.finish() == 0, first.output
    assert other.run(target) == {}


def test_a_result_from_the_future_is_refused_before_what_is_made_of_it(study):
    """The clock was set back: Snakemake would delete the new scores for their older time."""
    path = study.path("results/normal_matrix/c0.h5")
    ahead = time.time() + 1000
    os.utime(path, (ahead, ahead))
    before = study.artifacts()
    output = study.fail()
    assert re.search(
        r"^Error: results/normal_matrix/c0\.h5: a file's modification time must not be",
        output,
        re.M,
    )
    assert "Traceback" not in output
    assert study.artifacts() == before
    os.utime(path)
    assert study.run() == {"compute_scores": 1, "average_scores": 1}


@needs_compiler
def test_a_run_on_a_disk_that_knows_no_locks(tmp_path):
    """Preflight and jobs are told the same. Other disks: library/test_disks_without_locks.py."""
    study = own_study(tmp_path / "study", 1, ["few"])
    file = study.path("diabetes.py")
    told = 'print("locks:", os.environ.get("HDF5_USE_FILE_LOCKING"), file=sys.stderr)'
    file.write_text(f"import os, sys\n{file.read_text()}\n{told}\n")
    study.path("study.yaml").write_text(yaml.safe_dump(study.config))
    call = [sys.executable, "-m", "snakemake", "scores", "--cores", "2"]
    call += ["--configfile", "study.yaml", "--snakefile", study.snakefile]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = without_locks(tmp_path / "shim")
    done = patience.run(call, 120, cwd=study.folder, env=environment, **pipes)
    assert done.returncode == 0, done.stdout
    assert "locks: FALSE\n" in done.stdout
    logs = [path.read_text() for path in study.path("results/logs/compute_features").rglob("*.log")]
    assert ["locks: FALSE\n" in log for log in logs] == [True, True]
    assert len(pd.read_hdf(study.path("results/scores/few.h5"), "scores")) == 342

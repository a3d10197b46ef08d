"""Snakemake left running, so that a test can hurt it or its jobs."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import patience
import psutil
import yaml
from own_checkpoints import own_study
from workspace import FORKS, Workspace

# Training samples that take their time, so that a job can be hurt in the middle of its work, and a
# process that ends a while after it, so that it can be hurt then as well.
SLOWLY = """

atexit.register(time.sleep, 0.2)


class Slowly(torch.utils.data.Dataset):
    def __len__(self):
        return 342

    def __getitem__(self, i):
        time.sleep(0.002)
        return x[i], y[i]


def train_data():
    return Slowly()
"""
# Features of 700 KB, a sample at a time.
SMALL = {"projection": {"proj_dim": 512}, "compute": {"batch_size": 1}}


def small_study(folder: Path) -> Workspace:
    """Make a study of one checkpoint and one experiment; nothing has run."""
    study = own_study(folder, 1, ["few"], **SMALL)
    file = study.path("diabetes.py")
    file.write_text(f"import atexit, time\n{file.read_text()}{SLOWLY}")
    return study


def _is_job(process: psutil.Process, rule: str) -> bool:
    """Whether it does a job that logs to the rule's folder: all that it prints goes there."""
    try:
        log = Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:  # it has just ended
        return False
    return f"/logs/{rule}/" in str(log)


class Running:
    """A Snakemake that leads a session of its own."""

    def __init__(self, study: Workspace, *arguments: str) -> None:
        study.path("study.yaml").write_text(yaml.safe_dump(study.config, sort_keys=False))
        self.log = study.path("snakemake.log")
        command = (
            *(sys.executable, "-m", "snakemake", "--configfile", "study.yaml", "--cores", "1"),
            *("--snakefile", study.snakefile, *FORKS),
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                (*command, *arguments),
                cwd=study.folder,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                # As from a terminal, though these tests run in the background, where it is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.seen: set[int] = set()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition: Callable[[], object]) -> object:
        """Look every few milliseconds, and return the first answer that is true."""
        for _ in range(int(patience.longer(60_000))):
            if answer := condition():
                return answer
            assert self.process.poll() is None, self.output
            time.sleep(0.003)
        raise AssertionError(self.output)

    def next_job(self, rule: str) -> psutil.Process:
        """Return the process of the next job of a rule that was not returned before."""

        def new() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if child.pid not in self.seen and _is_job(child, rule):
                    self.seen.add(child.pid)
                    return child
            return None

        process = self.wait_for(new)
        assert isinstance(process, psutil.Process)
        return process

    def finish(self) -> int:
        patience.waited(self.process.wait, 200)
        return self.process.returncode

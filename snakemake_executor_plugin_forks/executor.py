"""The local executor, with another way to run a Python script."""

import os
import shlex
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import] -- its error alone
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from snakemake.benchmark import benchmarked
from snakemake.executors.local import Executor as LocalExecutor
from snakemake.logging import logger
from snakemake.script import PythonScript
from snakemake.shell import shell
from snakemake_interface_executor_plugins.settings import ExecutorSettingsBase

from snakemake_executor_plugin_forks.server import TEMPORARY, THREADS, Fork, set_preload, start

_execute_by_shell = PythonScript.execute_script


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Settings, made when the command line is read, before Snakemake reads the workflow."""

    preload: str = field(
        default="",
        metadata={
            "help": "What is imported before the first script, with commas: modules, names in "
            "modules, and functions to call, whose names end with ()."
        },
    )
    late: bool = field(
        default=False,
        metadata={
            "help": "Import it when it is known that there are jobs, not while Snakemake plans."
        },
    )

    def __post_init__(self) -> None:
        set_preload([name.strip() for name in self.preload.split(",") if name.strip()])
        if not self.late:
            start()


class Executor(LocalExecutor):
    """The local executor, whose Python scripts run in forks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        PythonScript.execute_script = execute_script

    def run_job(self, job: Any) -> None:
        """Run a job; the first one starts the server, where it has not been started."""
        start()
        super().run_job(job)


def execute_script(self: PythonScript, fname: str, edit: bool = False) -> None:
    """Run what Snakemake made of a script, in a fork where Snakemake's Python would run it.

    Raises:
        CalledProcessError: As by Snakemake's shell, if the script fails.
    """
    elsewhere = self.conda_env, self.container_img, self.env_modules, self.shadow_dir
    changed = self.resources.get("shell_exec"), shell._process_prefix, shell._process_suffix
    if any(elsewhere) or any(changed):
        return _execute_by_shell(self, fname, edit)
    environment = dict(os.environ) | dict.fromkeys(THREADS, str(self.threads))
    temporary = self.resources.get("tmpdir")
    environment |= dict.fromkeys(TEMPORARY, str(temporary)) if temporary else {}
    fork = Fork(Path(fname).absolute(), (), environment)
    with _measured(fork.pid, self.bench_record):
        status = fork.wait()
    if status:
        if status < 0:
            _explain(self.rulename, -status)
        raise subprocess.CalledProcessError(status, shlex.join([sys.executable, fname]))
    return None


@contextmanager
def _measured(process: int | None, record: Any) -> Generator[None, None, None]:
    """Have Snakemake measure a process for its ``benchmark``, if the rule has one."""
    with ExitStack() as stack:
        if record is not None:
            record.running_time = 0.0
            with suppress(psutil.NoSuchProcess):  # it has ended by now
                stack.enter_context(benchmarked(process, record))
        yield


def _explain(rule: str, number: int) -> None:
    """Say which signal has ended a script, and what that may mean."""
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    cause = (
        ", as by the system when memory runs out. Give the job more memory, or run fewer at a time "
        "(--cores, --resources)"
    ) * (number == signal.SIGKILL)
    logger.error(f"Error: the script of {rule} must end by itself. Found its end by {name}{cause}.")

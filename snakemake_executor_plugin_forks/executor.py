"""A variant of Snakemake's local executor that runs Python scripts in forked processes."""

import os
import shlex
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import] -- only its error class
import sys
from contextlib import ExitStack, suppress
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
    """The executor's command-line options. Snakemake parses them before it reads the workflow."""

    preload: str = field(
        default="",
        metadata={
            "help": "Comma-separated names to import before the first script runs. A name is a "
            "module, an object in a module, or a function to call, followed by ()."
        },
    )
    late: bool = field(
        default=False,
        metadata={"help": "Import when the first job starts, not already while jobs are planned."},
    )

    def __post_init__(self) -> None:
        set_preload([name.strip() for name in self.preload.split(",") if name.strip()])
        if not self.late:
            start()


class Executor(LocalExecutor):
    def __post_init__(self) -> None:
        super().__post_init__()
        PythonScript.execute_script = execute_script

    def run_job(self, job: Any) -> None:
        """Run a job. If the server from which scripts are forked is not running, start it first."""
        start()
        super().run_job(job)


def execute_script(self: PythonScript, fname: str, edit: bool = False) -> None:
    """Run the Python script of a job in a fork.

    If the script needs another Python or another shell, Snakemake runs it in a new process.

    Raises:
        CalledProcessError: If the script fails.
    """
    other_python = self.conda_env, self.container_img, self.env_modules, self.shadow_dir
    other_shell = self.resources.get("shell_exec"), shell._process_prefix, shell._process_suffix
    if any(other_python) or any(other_shell):
        return _execute_by_shell(self, fname, edit)
    environment = dict(os.environ) | dict.fromkeys(THREADS, str(self.threads))
    temporary = self.resources.get("tmpdir")
    environment |= dict.fromkeys(TEMPORARY, str(temporary)) if temporary else {}
    fork = Fork(Path(fname).absolute(), (), environment)
    with ExitStack() as stack:
        if self.bench_record is not None:  # The rule has a `benchmark`.
            self.bench_record.running_time = 0.0
            with suppress(psutil.NoSuchProcess):  # The script may already have ended.
                stack.enter_context(benchmarked(fork.pid, self.bench_record))
        status = fork.wait()
    if status:
        if status < 0:
            _explain(self.rulename, -status)
        raise subprocess.CalledProcessError(status, shlex.join([sys.executable, fname]))
    return None


def _explain(rule: str, number: int) -> None:
    """Log which signal ended the script of a rule. For SIGKILL, also log the probable cause."""
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    cause = (
        " The system sends this signal when memory runs out. Give the job more memory, or run "
        "fewer jobs at the same time (--cores, --resources)."
    )
    logger.error(
        f"Error: the script of {rule} was ended by {name}.{cause * (number == signal.SIGKILL)}"
    )

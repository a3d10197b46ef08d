"""Do what a rule's script does by a fork at once: no Python starts that would only wait for it.

Snakemake starts a shell and a Python for a script, which is most of a short job's time where a fork
does the work. ``by_forks`` takes the place of Snakemake's ``script`` among what its rules see.
"""

import inspect
import logging
import os
import shlex
import signal
import subprocess  # ruff: ignore[suspicious-subprocess-import] -- its error alone
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trak_core.errors import InputError
from trak_core.system.fork_client import Fork, own_server
from trak_core.system.fork_server import ONE_THREAD
from trak_core.system.job import MORE_MEMORY, describe_job, imports_of_job

# What a job has of its own where it isn't run by Snakemake's Python, on this disk, in its folder.
_ELSEWHERE = ("conda_env", "container_img", "env_modules", "shadow_dir")
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")


class _ShellWord(str):
    """A path that is one word where it is formatted into a line of shell."""

    __slots__ = ()

    def __format__(self, format_spec: str) -> str:
        return format(shlex.quote(self), format_spec)


def quote_executable(*, is_local: bool) -> None:
    """Have Snakemake quote this Python's path where it writes a script's line of shell.

    Where jobs are not local, its executors write lines of their own, for which the path must do.
    """
    if shlex.quote(sys.executable) == sys.executable:
        return
    if not is_local:
        raise InputError(
            "On an executor of clusters, the path of Snakemake's Python must be one word for a "
            f"shell, without spaces and signs. Found {sys.executable}. Make its environment in "
            "another folder.",
            code="config.python_path",
        )
    sys.executable = _ShellWord(sys.executable)


def _environment(threads: int, resources: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that Snakemake gives a script."""
    environment = dict(os.environ) | dict.fromkeys(ONE_THREAD, str(threads))
    temporary = resources.get("tmpdir")
    return environment | (dict.fromkeys(_TEMPORARY, str(temporary)) if temporary else {})


@contextmanager
def _measured(
    process: int, record: Any, measure: Callable[[int, Any], AbstractContextManager[Any]]
) -> Generator[None, None, None]:
    """Have Snakemake ``measure`` a process for its table, ``record``, as it measures a script's."""
    if record is None:
        yield
        return
    import psutil  # which Snakemake has

    with ExitStack() as stack:
        record.running_time = 0.0  # a table has it, of a process that has ended by now too
        with suppress(psutil.NoSuchProcess):
            stack.enter_context(measure(process, record))
        yield


def _tell_killed(log: str, number: int) -> None:
    """Write to a job's log which signal has ended it, and what that may mean."""
    means = f", as by the system when memory runs out. {MORE_MEMORY}" * (number == signal.SIGKILL)
    # A signal may have no name.
    with suppress(OSError, ValueError), Path(log).open("a", encoding="utf-8") as file:
        name = signal.Signals(number).name
        file.write(f"\nError: the job must end by itself. Found its end by {name}{means or '.'}\n")


def _is_done(
    named: Mapping[str, Any], measure: Callable[[int, Any], AbstractContextManager[Any]]
) -> bool:
    """Return False if no fork does a script, named as ``script`` names it.

    Raises:
        CalledProcessError: With the fork's status, if that is not 0.
    """
    server = own_server()
    if server is None or any(named[name] is not None for name in _ELSEWHERE):
        return False
    job = describe_job(SimpleNamespace(**named, rule=named["rulename"]))
    request = {
        "folder": str(Path.cwd()),
        "environment": _environment(named["threads"], named["resources"]),
        "arguments": [str(named["path"])],
        "call": ["trak_core.system.job:run_logged", job],
        "imports": imports_of_job(job),
        # No process of its own hears what the terminal tells Snakemake and all that it started.
        "hears": True,
    }
    with Fork(server, request) as fork:
        process = fork.process()
        if process is None:
            return False
        with _measured(process, named["bench_record"], measure):
            status = fork.status()
    stage = job["named"]["code"].split()[0]
    if status is None:
        # Not by print: after Ctrl-C, which may have ended it, nobody wants to know.
        logging.getLogger(__name__).error(
            "The process that forks for jobs has ended, and this job with it."
        )
    elif status < 0:
        _tell_killed(job["log"], -status)
    if status != 0:
        raise subprocess.CalledProcessError(1 if status is None else status, stage)
    return True


def by_forks(
    script: Callable[..., None], measure: Callable[[int, Any], AbstractContextManager[Any]]
) -> Callable[..., None]:
    """Return Snakemake's ``script``, which asks this process's server for a fork first.

    ``measure`` is Snakemake's way to benchmark a process, given what it records.
    """
    takes = inspect.signature(script)

    def run(*given: Any, **more: Any) -> None:
        if not _is_done(takes.bind(*given, **more).arguments, measure):
            script(*given, **more)

    # Another version of Snakemake may name what it hands over in another way.
    needed = {"path", "input", "output", "params", "wildcards", "threads", "resources", "log"}
    needed |= {"config", "rulename", "bench_record", *_ELSEWHERE}
    return run if needed <= takes.parameters.keys() else script

"""Limits in seconds of an idle machine: on a busy one they last as much longer as it is slower."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def longer(seconds: float) -> float:
    """Return how long the work of these seconds may take with all that runs now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def waited(wait: Callable[[float], T], seconds: float) -> T:
    """Return what a process gives that ``wait`` is told to wait for, for some time, until it ends.

    TimeoutExpired is raised where the seconds are over, however busy the machine was at first.
    """
    while True:
        began = time.monotonic()
        try:
            return wait(1)
        except subprocess.TimeoutExpired:
            seconds -= (time.monotonic() - began) / longer(1)
            if seconds <= 0:
                raise


def run(
    command: Any, seconds: float, given: str | None = None, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command as ``subprocess.run`` does, ``given`` its input; one that hangs is killed."""
    inputs = iter([given])
    with subprocess.Popen(command, stdin=subprocess.PIPE if given else None, **how) as process:
        try:
            out, err = waited(lambda step: process.communicate(next(inputs, None), step), seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_python(code: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, whose output is captured, and which must succeed."""
    how = {"capture_output": True, "text": True, "check": True} | how
    return subprocess.run([sys.executable, "-c", code, *arguments], **how)

"""A folder that may only be read, and processes for which that holds."""

import contextlib
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import patience
import pytest

linux_alone = pytest.mark.skipif(
    sys.platform != "linux", reason="root gives up a right as Linux has it"
)
# Root may write anywhere, unless it gives that up: CAP_DAC_OVERRIDE.
_WITHOUT_RIGHT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)\n"
_WITHOUT_RIGHT += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@contextlib.contextmanager
def read_only(folder: Path) -> Generator[None, None, None]:
    """Have nobody write into a folder and those below it."""
    folders = [path for path in (folder, *folder.rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o755)


def run_as_reader(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Return exit status and output of a Python that may not write into such folders."""
    command = [sys.executable, "-c", _WITHOUT_RIGHT, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = patience.run(command, 60, cwd=cwd, **pipes)
    return done.returncode, done.stdout

"""Run Python where a folder may only be read."""

import subprocess
import sys
from pathlib import Path

import patience
import pytest

linux_alone = pytest.mark.skipif(
    sys.platform != "linux", reason="root gives up a right as Linux has it"
)
# Root may write anywhere, unless it gives that up: CAP_DAC_OVERRIDE.
_WITHOUT_RIGHT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)\n"
_WITHOUT_RIGHT += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


def check_reader(results: Path, cwd: Path, calls: list[tuple[list[str], int, str]]) -> None:
    """Run Python for each (arguments, exit status, part of the output), and check these.

    Python may not write into the results folder, which stays as it was.
    """
    folders = [results, *(path for path in results.rglob("*") if path.is_dir())]
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    for path in folders:
        path.chmod(0o555)
    try:
        for arguments, status, said in calls:
            command = [sys.executable, "-c", _WITHOUT_RIGHT, *arguments]
            done = patience.run(command, 60, cwd=cwd, **pipes)
            assert (done.returncode, said in done.stdout) == (status, True), done.stdout
            assert "Traceback" not in done.stdout
    finally:
        for path in folders:
            path.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before

"""A job's way to a fork of a process that has imported everything (``fork_server``); no library."""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess  # ruff: ignore[suspicious-subprocess-import] -- runs this very Python
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from trak_core.system.fork_server import LENGTH, STATUS, YES

_SOCKET = "TRAK_CORE_FORK_SERVER"
# What stages import only when they come to it.
_LATER = ("numpy", "pandas", "tables", "matplotlib.backends.backend_agg")
# What Snakemake sets for a job of one thread: libraries look at it once, when they are imported.
_ONE_THREAD = dict.fromkeys(
    (
        "GOTO_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)


def can_fork() -> bool:
    """Return whether this machine's jobs may be forks: on Linux, where no job can use a GPU.

    It takes Linux 5.3, and a Python that was built for one: some of conda's are not.
    """
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def start_fork_server(stages: Iterable[str], study: Iterable[str]) -> None:
    """Start a process that forks for the jobs of this one, those of one thread, and ends with it.

    Args:
        stages: Modules of ``trak_core.stages``.
        study: What a study imports, see ``trak_core.provenance.study_imports``.
    """
    folder = tempfile.mkdtemp(prefix="trak-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_SOCKET] = f"{folder}/socket"
    # No end of it is closed before this process ends: its standard input says that it lives.
    server = subprocess.Popen(  # ruff: ignore[subprocess-without-shell-equals-true]
        [
            *(sys.executable, "-m", "trak_core.system.fork_server", os.environ[_SOCKET]),
            *(f"trak_core.stages.{stage}" for stage in stages),
            *_LATER,
            *study,
        ],
        # An empty folder: a module of the user's must not stand for one of ours.
        cwd=folder,
        env=os.environ | _ONE_THREAD,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    # It listens before it imports: jobs that come meanwhile wait for it.
    if not server.stdout.read(1):
        del os.environ[_SOCKET]
    server.stdout.close()
    atexit.register(lambda: server.stdin and server.stdin.close())


def done_by_fork(asked: Mapping[str, Any]) -> bool:
    """Have a job done by a fork, and end as it ends.

    Args:
        asked: What to do (``trak_core.system.door``).

    Returns:
        False, if it must be done here.
    """
    path = os.environ.get(_SOCKET)
    if path is None:
        return False
    with socket.socket(socket.AF_UNIX) as connection:
        process = {"folder": str(Path.cwd()), "environment": dict(os.environ)}
        process |= {"paths": sys.path, "arguments": sys.argv}
        request = json.dumps(process | {"asked": asked}).encode()
        try:
            connection.connect(path)
            socket.send_fds(connection, [LENGTH.pack(len(request))], [0, 1, 2])
            connection.sendall(request)
            if connection.recv(1) != YES:
                return False
        except OSError:
            return False

        def pass_on(number: int, _frame: FrameType | None) -> None:
            with suppress(OSError):  # the server has just gone: the answer ends
                connection.sendall(bytes([number]))

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        answer = connection.recv(STATUS.size, socket.MSG_WAITALL)
    if len(answer) < STATUS.size:
        sys.exit("The process that forks for jobs has ended, and this job with it.")
    (status,) = STATUS.unpack(answer)
    if status < 0:
        # As its shell would have seen it.
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)

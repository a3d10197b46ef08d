"""A process that has imported what jobs need, and forks for each: most of a short job is imports.

    python -m trak_core.system.fork_server SOCKET MODULE...

It lives as long as its standard input, which is Snakemake's, and its forks as long as it. A fork
gets a job's folder, environment, paths of modules and standard streams; what libraries look at when
they are imported must be the same, or else the job starts by itself (``trak_core.system.forked``).
So must every job if an import left threads running, or CUDA in use: a fork would have them half.

Linux alone: it has the calls, and libraries that may be forked.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trak_core.system.door import run
from trak_core.system.job import logged_to
from trak_core.system.quiet import quiet_libraries

# Of the environment, what a shell or Snakemake sets anew for every job, and no library is made by.
OWN = {"PWD", "OLDPWD", "SHLVL", "_", "TMPDIR", "TMP", "TEMP", "TEMPDIR"}
YES, NO = b"y", b"n"
# What follows once a job has ended: its status as Popen's, and a request's length.
STATUS, LENGTH = struct.Struct("!i"), struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def _import(name: str) -> None:
    """Import a module, or what one has under this name; what fails here says so in the job."""
    with suppress(Exception):
        first, *rest = name.split(".")
        found: Any = importlib.import_module(first)
        for number, part in enumerate(rest):
            found = getattr(found, part, None)
            if found is None:
                found = importlib.import_module(".".join([first, *rest[: number + 1]]))


def _can_fork() -> bool:
    torch = sys.modules.get("torch")
    is_used = torch is not None and torch.cuda.is_initialized()
    return len(list(Path("/proc/self/task").iterdir())) == 1 and not is_used


def _received(connection: socket.socket) -> tuple[dict[str, Any], Sequence[int]]:
    """Return what a job is asked, and of which process, and its standard streams."""
    head, streams, *_ = socket.recv_fds(connection, LENGTH.size, 3)
    try:
        (missing,) = LENGTH.unpack(head)
        parts = []
        while missing:
            parts.append(connection.recv(missing))
            missing -= len(parts[-1])
            if not parts[-1]:
                raise EOFError("a job's process has gone")
        return json.loads(b"".join(parts)), streams
    except BaseException:
        _close(streams)
        raise


def _close(streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)


def _be(request: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    """Become the job's process, and do its work."""
    # The work ends with the server, whatever ends that.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:
        os._exit(1)
    os.setpgid(0, 0)
    # As a process has them that was started; the server ignores both.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What the server's imports are to do at their end is the server's.
    atexit._clear()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    # The others are the same, or were set by what is imported.
    for name in OWN:
        os.environ.pop(name, None)
        if name in request["environment"]:
            os.environ[name] = request["environment"][name]
    sys.path[:], sys.argv[:] = request["paths"], request["arguments"]
    tempfile.tempdir = None
    # Or all would draw the same where a study sets no seed; Python's own generator sees to itself.
    sys.modules["numpy"].random.seed()
    asked = request["asked"]
    with logged_to(asked["log"]):
        run(asked)


def _work(request: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    """Be the job's process from its start to its end; never returns."""
    status = 0
    try:
        _be(request, streams, server)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    # What Python does at its end, but for taking apart its modules.
    with suppress(BaseException):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 255)


def _looked_at(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OWN}


def _serve(listener: socket.socket, environment: Mapping[str, str]) -> None:
    """Fork for jobs, pass on signals to them, and tell how they ended.

    Args:
        listener: Where jobs ask.
        environment: That imports saw.
    """
    is_able = _can_fork()
    server = os.getpid()
    # Of each job: its process, to be watched, and where it was asked for.
    jobs: dict[int, tuple[int, socket.socket]] = {}
    watched = {sys.stdin.fileno(): None, listener.fileno(): None}
    while True:
        sources = [*watched, *jobs, *(one.fileno() for _, one in jobs.values())]
        ready = set(select.select(sources, [], [])[0])
        if sys.stdin.fileno() in ready:
            return
        for handle, (process, connection) in list(jobs.items()):
            if handle in ready:
                _, status = os.waitpid(process, 0)
                with suppress(OSError):
                    connection.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
                connection.close()
                os.close(handle)
                del jobs[handle]
            elif connection.fileno() in ready:
                numbers = b""
                with suppress(OSError):
                    numbers = connection.recv(8)
                # Who asked has gone: nobody waits for this job any more.
                for number in numbers or [signal.SIGKILL]:
                    with suppress(OSError):
                        os.killpg(process, number)
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        try:
            request, streams = _received(connection)
        except (OSError, EOFError, ValueError, struct.error):
            connection.close()
            continue
        process = None
        if is_able and _looked_at(request["environment"]) == _looked_at(environment):
            with suppress(OSError):  # no room for one more process
                process = os.fork()
        if process == 0:
            for one in (listener, connection, *(other for _, other in jobs.values())):
                one.close()
            _work(request, streams, server)
        # Who asked may have gone: then its connection has ended, which is looked at above.
        if process is None:
            with suppress(OSError):
                connection.sendall(NO)
            connection.close()
        else:
            jobs[os.pidfd_open(process)] = process, connection
            with suppress(OSError):
                os.setpgid(process, process)
            with suppress(OSError):
                connection.sendall(YES)
        _close(streams)


def main() -> None:
    """Listen, import, and serve until standard input ends."""
    path, *modules = sys.argv[1:]
    environment = dict(os.environ)
    # What all processes of a session get is for Snakemake and the jobs, of which this tells.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        # Nobody is refused while imports run: jobs wait, which is what they would spend anyway.
        try:
            listener.bind(path)
        except OSError:  # a folder for temporary files with a very long name
            return
        listener.listen(1024)
        os.write(1, YES)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        quiet_libraries()
        terminal = os.dup(2)
        os.dup2(1, 2)  # nobody has asked for what imports say
        for name in modules:
            _import(name)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        # Or every fork would copy what a collection looks at.
        gc.collect()
        gc.freeze()
        _serve(listener, environment)
    with suppress(OSError):
        Path(path).unlink()
        Path(path).parent.rmdir()
    with suppress(Exception):
        atexit._run_exitfuncs()
    # What else Python would clean up takes a second, and jobs end with this process.
    os._exit(0)


if __name__ == "__main__":
    main()

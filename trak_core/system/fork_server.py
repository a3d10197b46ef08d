"""Fork a process for each job from one that has imported what jobs need: imports are most of a
short job's time.

It is started and asked by ``trak_core.system.fork_client``. What a job needs beyond what the server
has imported, the server imports first; when nobody asks, it imports what will be needed.
The server ends with its standard input, which is Snakemake's, and its forks end with it.

A fork gets the folder, paths of modules, arguments and standard streams of the process that asked,
and of its environment what changes from job to job. The rest of the environment must be the one
that the server's imports saw, or else the job runs in its own process. So does every job if an
import left threads running or CUDA in use, because a fork would have them half.

On Linux alone, because other systems lack the calls, or libraries that may be forked. Nothing here
imports a library: every start of Snakemake and every job imports this.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trak_core.system.job import quiet_libraries, run_to_the_end

SOCKET = "TRAK_CORE_FORK_SERVER"
# What Snakemake sets for a job of one thread: libraries read it once, when they are imported.
_LIBRARIES = ("GOTO_NUM", "MKL_NUM", "NUMEXPR_NUM", "OMP_NUM", "OPENBLAS_NUM", "VECLIB_MAXIMUM")
ONE_THREAD = {f"{library}_THREADS": "1" for library in _LIBRARIES}
# pandas imports pyarrow where there is one, whose allocator would start a thread.
NO_ARROW_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Environment variables that change from job to job, and that no library reads at import; the last
# two are set by Snakemake's plugin for S3.
_CHANGING = {"PWD", "OLDPWD", "SHLVL", "_", "TMPDIR", "TMP", "TEMP", "TEMPDIR", *NO_ARROW_THREAD}
_CHANGING |= {"AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"}
YES, _NO = b"y", b"n"
# A request begins with its length. A fork's process follows the yes; its status, as Popen gives it,
# is the last answer.
LENGTH, PROCESS, STATUS = struct.Struct("!Q"), struct.Struct("!i"), struct.Struct("!i")
# An environment has some KiB; requests are read by parts, so that no client has others wait.
_MOST_BYTES, _PART_BYTES = 2**24, 2**16
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end
_PR_SET_PDEATHSIG = 1
STOPS = (signal.SIGTERM, signal.SIGINT)
# Forks that nobody but this process tells what a whole session is told.
_hearing: set[int] = set()


def is_mine(connection: socket.socket) -> bool:
    """Return whether the other end is a process of this user: such a name is open to all."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(peer)
    return user == os.getuid()


def _import(names: Iterable[str]) -> None:
    """Import modules, or what modules have under these names; a failure shows in the job.

    A name that ends with ``()`` is a function's, which is called.
    """
    terminal, silence = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # nobody has asked for what imports say
    for name in names:
        with suppress(Exception):
            attribute = pkgutil.resolve_name(name.removesuffix("()"))
            if name.endswith("()"):
                attribute()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(terminal, 2)
    os.close(terminal)
    os.close(silence)
    # Or every fork would copy what a collection looks at.
    gc.freeze()


def is_forkable() -> bool:
    torch = sys.modules.get("torch")
    is_used = torch is not None and torch.cuda.is_initialized()
    return len(list(Path("/proc/self/task").iterdir())) == 1 and not is_used


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a request that can be done; a ``ValueError`` for any other."""
    try:
        request = json.loads(text)
        texts = [*request.get("environment", {}).items(), *request.get("imports", ())]
        if "call" in request or "imports" not in request:
            function, _ = request["call"]
            texts += [request["folder"], function]
        texts += [*request.get("paths", ()), *request.get("arguments", ())]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no request") from error
    if not all(isinstance(text, str | tuple) for text in texts):
        raise ValueError("a request is of texts")
    return request


@dataclass(slots=True)
class _Client:
    """A process that asks, what came of its request so far, and its standard streams."""

    connection: socket.socket
    data: bytes = b""
    streams: list[int] = field(default_factory=list)

    def read(self) -> dict[str, Any] | None:
        """Return the request if it is whole, after reading the part that is there.

        An ``EOFError``, ``OSError`` or ``ValueError`` if it never will be.
        """
        size = LENGTH.unpack_from(self.data)[0] if len(self.data) >= LENGTH.size else 0
        # No more than the request: what comes after it are signals.
        missing = LENGTH.size + size - len(self.data)
        part, streams, *_ = socket.recv_fds(self.connection, min(missing, _PART_BYTES), 3)
        self.streams += streams
        self.data += part
        if not part:
            raise EOFError("a job's process has gone")
        if len(self.data) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self.data)
        if size > _MOST_BYTES:
            raise ValueError("a request is short")
        text = self.data[LENGTH.size :]
        return _parsed(text) if len(text) == size else None

    def close(self) -> None:
        """Let go of all that it gave."""
        self.connection.close()
        _close(self.streams)


def _close(streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)


def _leave_terminal() -> None:
    """Have no terminal: in its background, a process that asks it would be stopped for ever."""
    import fcntl
    import termios

    with suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)


def _be(request: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    """Take the place of the process that asked, and do its work."""
    # The work ends with the server, whatever ends the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:
        os._exit(1)
    os.setpgid(0, 0)
    _leave_terminal()
    # As in a process that was just started; the server ignores both. One that came since the fork
    # was held back, and takes effect now.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPS, signal.SIGTSTP))
    gc.enable()
    # What the server's imports do at their end is the server's.
    atexit._clear()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if os.isatty(0):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    given = request.get("environment", {})
    for name in _CHANGING:
        os.environ.pop(name, None)
    os.environ.update({name: given[name] for name in _CHANGING & given.keys()})
    sys.path[:] = request.get("paths", sys.path)
    sys.argv[:] = request.get("arguments", sys.argv)
    tempfile.tempdir = None
    # Or all would draw the same where a study sets no seed; Python's own generator sees to itself.
    sys.modules["numpy"].random.seed()
    function, argument = request["call"]
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(argument)


def lasting_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are the same in all jobs."""
    return {name: value for name, value in environment.items() if name not in _CHANGING}


def _serve(
    listener: socket.socket, environment: Mapping[str, str], limits: tuple[int, int]
) -> None:
    """Fork for requests, pass on signals, tell how forks ended.

    Imports saw this environment; forks may open as many files as these limits say.
    """
    lasting = lasting_of(environment)
    # What was imported for a request, and what will be when nobody asks.
    imported: set[str] = set()
    later: deque[str] = deque()
    # By the descriptor to watch: each fork's process, and the connection that asked for it.
    jobs: dict[int, tuple[int, socket.socket]] = {}
    # By their descriptors: those whose request isn't whole yet.
    clients: dict[int, _Client] = {}
    stdin, requests = sys.stdin.fileno(), listener.fileno()
    while True:
        sources = select.poll()  # `select` takes no file beyond the first 1024
        connections = (other.fileno() for _, other in jobs.values())
        for source in (stdin, requests, *clients, *jobs, *connections):
            sources.register(source, select.POLLIN)
        ready = {source for source, _ in sources.poll(0 if later else None)}
        if stdin in ready:
            return
        if later and not ready:
            _import([later.popleft()])
        for handle, (process, connection) in list(jobs.items()):
            if handle in ready:
                _hearing.discard(process)
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
                # Who asked has gone: nobody waits for this job any more. Snakemake may have been
                # killed, and then this process ends as well, at which its forks are to clear up.
                end = signal.SIGTERM if process in _hearing else signal.SIGKILL
                for number in numbers or [end]:
                    with suppress(OSError):
                        os.killpg(process, number)
        for client in [clients[source] for source in ready & clients.keys()]:
            number = client.connection.fileno()
            try:
                request = client.read()
            except (OSError, EOFError, ValueError):
                del clients[number]
                client.close()
                continue
            if request is None:
                continue
            del clients[number]
            process = None
            if "call" not in request:
                later.extend(request["imports"])
                client.close()
                continue
            missing = [name for name in request.get("imports", ()) if name not in imported]
            if missing:
                _import(missing)
                imported.update(missing)
            if is_forkable() and lasting_of(request.get("environment", lasting)) == lasting:
                others = [*(other for _, other in jobs.values()), listener]
                process = _forked(request, client, [*others, *clients.values()], limits)
            if process is not None:
                jobs[os.pidfd_open(process)] = process, client.connection
            # Who asked may have gone: then its connection has ended, which is looked at above.
            with suppress(OSError):
                client.connection.sendall(_NO if process is None else YES + PROCESS.pack(process))
            if process is None:
                client.connection.close()
            _close(client.streams)
        if requests in ready:
            with suppress(OSError):  # no room for one more file: it waits
                connection, _ = listener.accept()
                if is_mine(connection):
                    clients[connection.fileno()] = _Client(connection)
                else:
                    connection.close()


def _forked(
    request: Mapping[str, Any],
    client: _Client,
    others: Iterable[socket.socket | _Client],
    limits: tuple[int, int],
) -> int | None:
    """Return the process of a fork that does what was asked; None if there is no room for one.

    It lets go of what the server has of ``others``, and may open as many files as ``limits`` say.
    """
    import resource

    server, process = os.getpid(), None
    # Until the fork has handlers of its own.
    held = (*STOPS, signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    with suppress(OSError):
        process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for other in (client.connection, *others):
            other.close()
        run_to_the_end(lambda: _be(request, client.streams, server))
    if process is not None:
        with suppress(OSError):
            os.setpgid(process, process)
        if request.get("hears"):
            _hearing.add(process)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
    return process


def _pass_on(number: int, _frame: object) -> None:
    for process in list(_hearing):
        with suppress(OSError):
            os.killpg(process, number)


def _pause(_number: int, _frame: object) -> None:
    """Stop with all that would hear it, as Ctrl-Z stops Snakemake, until both go on."""
    _pass_on(signal.SIGSTOP, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    _pass_on(signal.SIGCONT, None)


def main() -> None:
    """Listen, import, and serve until standard input ends."""
    name, *modules = sys.argv[1:]
    # Started in /, whose folders no job may import; PYTHONPATH's empty parts lead there too.
    sys.path[:] = [path for path in sys.path if path != "/"]
    environment = dict(os.environ)
    import resource  # POSIX has it; what every start imports must not need it

    # Each job keeps two files open here.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    # A signal to a whole session is for Snakemake and the jobs; who waits for one passes its on.
    for number in STOPS:
        signal.signal(number, _pass_on)
    signal.signal(signal.SIGTSTP, _pause)
    with socket.socket(socket.AF_UNIX) as listener:
        # Nobody is refused while imports run: jobs wait, which is what they would spend anyway.
        # A name without a file: nothing stays on the disk, whatever is killed.
        listener.bind(f"\0{name}")
        listener.listen(1024)
        with suppress(BrokenPipeError):  # who started it was stopped: it ends below
            os.write(1, YES)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        quiet_libraries()
        gc.disable()  # imports leave next to nothing to collect, and it takes a sixth of their time
        _import(modules)
        _serve(listener, environment, limits)
    with suppress(Exception):
        atexit._run_exitfuncs()
    # Python's own cleaning up would take a second; forks end with this process.
    os._exit(0)


if __name__ == "__main__":
    main()

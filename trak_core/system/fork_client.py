"""Ask the fork server to run a job or the preflight, in place of starting a new Python.

The user's Snakemake starts the server (``start_fork_server``), whose first fork is the preflight,
or takes over the one that ``trak run`` started before it became Snakemake. It asks the server for
its jobs (``script_forks``); where its scripts are called in a way that is not known, the process
that it starts for a job asks, and waits (``done_by_fork``). Nothing here imports a library: every
start of Snakemake and every job imports this.
"""

import atexit
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess  # ruff: ignore[suspicious-subprocess-import] -- runs this very Python
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from trak_core.system.fork_server import (
    LENGTH,
    NO_ARROW_THREAD,
    ONE_THREAD,
    PROCESS,
    SOCKET,
    STATUS,
    STOPS,
    YES,
    is_forkable,
    is_mine,
    lasting_of,
)
from trak_core.system.job import is_installed

# A server that was started before Snakemake: name, standard input, the process that started it
# and became Snakemake, and a digest of its environment. Others inherit what is for that one alone.
_EARLY = "TRAK_CORE_EARLY_SERVER"
# Packages that start threads when they are used, as a tokenizer does, not when they are imported.
_WITHOUT_THREADS = {"transformers", "tokenizers", "safetensors", "huggingface_hub", "peft"}


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


def serve_forks(modules: Iterable[str]) -> tuple[str, subprocess.Popen[bytes]] | None:
    """Return the socket's name and the process of a server that imports ``modules``.

    It ends with its standard input. An import that fails says so in the job that needs it. None if
    the server can't listen.
    """
    name = f"trak-{secrets.token_hex(16)}"
    # From its first moment on: Ctrl-C is for who waits for its forks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    server = subprocess.Popen(  # ruff: ignore[subprocess-without-shell-equals-true]
        [sys.executable, "-m", "trak_core.system.fork_server", name, *modules],
        # A module in the user's folder must not stand for one of ours.
        cwd="/",
        env=os.environ | ONE_THREAD | NO_ARROW_THREAD | {SOCKET: name},  # as jobs have it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert server.stdout is not None
    # It listens before it imports: jobs that come meanwhile wait for it.
    listens = bool(server.stdout.read(1))
    server.stdout.close()
    return (name, server) if listens else None


@dataclass(frozen=True, slots=True)
class _Server:
    """A server of this process: its standard input, and what of its environment lasts."""

    name: str
    stdin: IO[bytes]
    environment: str
    process: subprocess.Popen[bytes] | None = None  # not known of one that was taken over

    def end(self) -> None:
        """Let it end with its forks; it ends with this process anyway."""
        self.stdin.close()


_own: _Server | None = None


def _environment() -> str:
    """Return a digest of what a server of this process would be started with and that lasts."""
    lasts = lasting_of(os.environ)
    named = [(name, lasts[name]) for name in sorted(lasts.keys() - {SOCKET, _EARLY})]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def name_library() -> None:
    """Have processes that this one starts import the trak_core that it has imported.

    They find an installed one without help.
    """
    library = str(Path(__file__).parents[2])
    others = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if library not in sysconfig.get_paths().values() and others[:1] != [library]:
        os.environ["PYTHONPATH"] = os.pathsep.join([library, *others])


def start_early(modules: Sequence[str]) -> None:
    """Start a server for the Snakemake that this process is about to become."""
    name_library()
    os.environ.pop(_EARLY, None)
    if can_fork() and start_fork_server(modules) is not None and _own is not None:
        stdin = _own.stdin.fileno()
        os.set_inheritable(stdin, True)
        os.environ[_EARLY] = json.dumps([_own.name, stdin, os.getpid(), _own.environment])


def take_over_early(*, forks: bool) -> None:
    """Take over the server that ``start_early`` has left, or end it where jobs are no forks."""
    global _own
    early = os.environ.pop(_EARLY, None)
    if early is None:
        return
    name, stdin, process, environment = json.loads(early)
    if process != os.getpid():
        return
    os.set_inheritable(stdin, False)
    server = _Server(name, os.fdopen(stdin, "wb"), environment)
    if forks:
        _own = server
        atexit.register(server.end)
    else:
        server.end()


def start_fork_server(modules: Sequence[str]) -> str | None:
    """Return the name of this process's server, which imports ``modules`` when it has time.

    It is started if there is none yet, or if the environment has changed since; then it imports
    them first of all. None if there can be none.
    """
    global _own
    environment = _environment()
    if _own is not None and _own.environment == environment:
        connection = _send(_own.name, {"imports": modules})
        if connection is not None:
            connection.close()
            return _own.name
    if _own is not None:
        _own.end()
    started = serve_forks(modules)
    if started is None:
        return None
    name, process = started
    assert process.stdin is not None
    _own = _Server(name, process.stdin, environment, process)
    atexit.register(_own.end)
    return _own.name


def own_server() -> str | None:
    """Return the name of this process's server; None without one."""
    return None if _own is None else _own.name


def offer_forks(server: str | None) -> None:
    """Have jobs that this process starts from now on ask a server for forks."""
    if server is not None:
        os.environ[SOCKET] = server


def libraries_since(before: Collection[str]) -> list[str]:
    """Return the installed modules that were imported since ``sys.modules`` had those, in order.

    Where threads run, or CUDA is in use, only those whose import is known to start none: a server
    must not import the others.
    """
    if sys.platform != "linux":
        return []
    is_alone = is_forkable()
    new = [
        (name, vars(module).get("__spec__"))
        for name, module in list(sys.modules.items())
        if name not in before and isinstance(module, ModuleType)
    ]
    return [
        name
        for name, spec in new
        if (is_alone or name.partition(".")[0] in _WITHOUT_THREADS)
        and (spec is not None and spec.name == name and is_installed(str(spec.origin)))
    ]


def done_by_fork(function: str, argument: Any, imports: Sequence[str] = ()) -> bool:
    """Return False if no fork does this process's work; else end as the fork ends.

    The fork calls the function ``module:name`` with an argument that is ready for JSON, of a server
    that has imported ``imports``.
    """
    server = os.environ.get(SOCKET)
    if server is None:
        return False
    request = {
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "paths": sys.path,
        "arguments": sys.argv,
        "call": [function, argument],
        "imports": list(imports),
    }
    status = status_of_fork(server, request)
    if status is not None:
        end_as(status)
    return False


def _send(
    server: str,
    request: Mapping[str, Any],
    streams: Sequence[int] = (),
    seconds: float | None = None,
) -> socket.socket | None:
    """Return a connection to the server that has the request; None if it doesn't take it."""
    text = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(f"\0{server}")
        if is_mine(connection):
            socket.send_fds(connection, [LENGTH.pack(len(text))], streams)
            connection.sendall(text)
            return connection
    except OSError:
        pass
    connection.close()
    return None


class Fork:
    """A fork that a server was asked for.

    A request has ``folder``; ``call``, a function's name and its argument; perhaps ``environment``,
    which must be the server's, ``paths`` of modules, ``arguments`` for ``sys.argv``,
    ``imports``, modules that the server imports before, and ``hears``, whether signals to the
    server are passed on to it. ``streams`` are its standard streams. What
    still runs when this is closed is killed.
    """

    def __init__(
        self,
        server: str,
        request: Mapping[str, Any],
        streams: Sequence[int] = (0, 1, 2),
        seconds: float | None = None,
    ) -> None:
        self._connection = _send(server, request, streams, seconds)
        self._answer = b""
        self._begun = len(YES) + PROCESS.size
        self._size = self._begun + STATUS.size

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def begins(self) -> bool:
        """Wait until it is known whether there is a fork, and return it."""
        return self.process() is not None

    def process(self) -> int | None:
        """Wait until it is known whether there is a fork, and return its process; None if not."""
        is_begun = self._has(len(YES)) and self._answer.startswith(YES) and self._has(self._begun)
        return PROCESS.unpack_from(self._answer, len(YES))[0] if is_begun else None

    def status(self, seconds: float | None = None) -> int | None:
        """Return the fork's return code, as Popen gives it, when it has ended.

        None if there is no fork, or if the server ended before it; a ``TimeoutError`` if it has not
        ended after some ``seconds``.
        """
        if self._connection is not None:
            self._connection.settimeout(seconds)
        is_over = self.begins() and self._has(self._size)
        return STATUS.unpack_from(self._answer, self._begun)[0] if is_over else None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(OSError):  # the server has just gone: the answer ends
            if self._connection is not None:
                self._connection.sendall(bytes([number]))

    def _has(self, size: int) -> bool:
        """Read the answer up to a size; return whether there is so much of it."""
        while self._connection is not None and len(self._answer) < size:
            try:
                part = self._connection.recv(size - len(self._answer))
            except TimeoutError:
                raise
            except OSError:
                break
            if not part:
                break
            self._answer += part
        return len(self._answer) >= size


def status_of_fork(server: str, request: Mapping[str, Any]) -> int | None:
    """Return the return code of a fork for a request, see ``Fork``; None if there is no fork.

    Signals are passed on to it while it is waited for.
    """
    with Fork(server, request) as fork:
        if not fork.begins():
            return None
        for number in STOPS:
            signal.signal(number, lambda number, _frame: fork.signal(number))
        status = fork.status()
    if status is None:
        sys.exit("The process that forks for jobs has ended, and this job with it.")
    return status


def end_as(status: int) -> NoReturn:
    """End this process as another one ended, by the same signal if it was one.

    What has nothing more to do than that need not take its modules apart, which takes a job's
    waiting process a seventh of its time.
    """
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)

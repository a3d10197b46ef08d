"""Run Python scripts as forks of one process that has already imported large modules.

This process is the forkserver of Python's ``multiprocessing``. If a script could behave differently
in a fork than in a new Python process, the fork replaces itself by a new one (README.md).
"""

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, process, resource_tracker, spawn
from pathlib import Path
from types import ModuleType
from typing import Any

# Snakemake sets these variables to a job's number of threads. Libraries read them at import.
_LIBRARIES = ("OMP_NUM", "GOTO_NUM", "OPENBLAS_NUM", "MKL_NUM", "VECLIB_MAXIMUM", "NUMEXPR_NUM")
THREADS = [f"{library}_THREADS" for library in _LIBRARIES]
TEMPORARY = ["TMPDIR", "TMP", "TEMPDIR", "TEMP"]
# pandas imports pyarrow if it is installed. Without this setting, pyarrow's allocator would start a
# thread, and a process with several threads cannot be forked safely.
NO_ARROW_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Variables that may differ between server and script, because no library reads them at import.
# Snakemake's plugin for S3 sets the last two.
_NEVER_READ = {*TEMPORARY, *NO_ARROW_THREAD}
_NEVER_READ |= {"AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"}
# The environment variable that tells the server, as JSON, the names to import, the environment
# variables of scripts, and the process id of Snakemake.
_REQUEST = "SNAKEMAKE_FORKS_SERVER"
_TASKS, _OOM_SCORE = Path("/proc/self/task"), Path("/proc/self/oom_score_adj")

_context = multiprocessing.get_context("forkserver")
# Protects multiprocessing's list of processes, which is not thread-safe.
_lock = threading.Lock()
_modules: list[str] = []
_is_started = False
_running: set[int] = set()  # process ids of running scripts
# In the server and its forks: the environment variables during the imports, or None if it is unsafe
# to fork. A script with other variables runs in a new process.
_at_import: dict[str, str] | None = None
_paths: list[str] = []
_server = 0


def set_preload(modules: Sequence[str]) -> None:
    """Set the names that the server imports. If a name ends with ``()``, it is also called."""
    _modules[:] = modules


def start() -> None:
    """Start the server if it was not started before. This must be called in the main thread."""
    global _is_started
    with _lock:
        if _is_started:
            return
        _is_started = True
        atexit.register(_end_running)
        environment = dict(os.environ)
        scripts = environment | dict.fromkeys(THREADS, "1")
        request = {_REQUEST: json.dumps([_modules, scripts, os.getpid()]), "PYTHONSAFEPATH": "1"}
        forkserver.set_forkserver_preload([f"{__package__}.preload"])
        # The resource tracker unblocks SIGINT when it starts, so start it before blocking SIGINT.
        resource_tracker.ensure_running()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.environ.update(scripts | NO_ARROW_THREAD | request)
        # Since Python 3.12.8 and 3.13.1, multiprocessing passes sys.path, which Snakemake has
        # changed, to the server. The server must have the sys.path of a new Python process instead.
        get_preparation_data = spawn.get_preparation_data
        spawn.get_preparation_data = lambda _name: {}
        try:
            forkserver.ensure_running()
        finally:
            spawn.get_preparation_data = get_preparation_data
            os.environ.clear()
            os.environ.update(environment)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _end_running() -> None:
    """Send SIGTERM to running scripts, then SIGCONT so that suspended scripts receive SIGTERM."""
    for pid in [*_running]:
        for number in (signal.SIGTERM, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _end_with_parent(process: int) -> None:
    """Make this process end when its parent ends, or now if this parent has already ended.

    ``process`` is the id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        os._exit(1)


def serve() -> None:
    """Import, in the server process, the names that ``set_preload`` was given."""
    global _at_import, _server
    _server = os.getpid()
    # Ctrl-C ends the scripts and the process that waits for them. It must not end the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if _REQUEST not in os.environ:  # multiprocessing has restarted a server that was killed
        return
    modules, environment, caller = json.loads(os.environ[_REQUEST])
    _end_with_parent(caller)
    os.environ.clear()
    os.environ.update(environment | NO_ARROW_THREAD)
    _paths[:] = sys.path
    terminal, silence = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    gc.disable()  # Garbage collection takes a sixth of the import time and frees almost nothing.
    for name in modules:
        with suppress(Exception):  # A script that needs the name will raise the same error.
            attribute = pkgutil.resolve_name(name.removesuffix("()"))
            if name.endswith("()"):
                attribute()
    gc.enable()
    gc.freeze()  # Otherwise, garbage collection in a fork would copy the memory of all imports.
    sys.stderr.flush()
    os.dup2(terminal, 2)
    os.close(terminal)
    os.close(silence)
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    is_alone = sys.platform == "linux" and len([*_TASKS.iterdir()]) == 1
    _at_import = _read_at_import(environment) if is_alone and not uses_cuda else None


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in environment.keys() - _NEVER_READ}


def _run(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a Python script in this process, which is a fork, as ``python script`` would."""
    _end_with_parent(_server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # If memory runs out, the kernel must kill this process, not the server that other scripts need.
    with suppress(OSError):
        _OOM_SCORE.write_text("300")
    if _at_import != _read_at_import(environment):
        command = [sys.executable, script, *arguments]
        # ruff: ignore[start-process-with-no-shell] -- this Python, with separate arguments
        os.execve(sys.executable, command, environment)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = [script, *arguments]
    folder = [] if environment.get("PYTHONSAFEPATH") else [str(Path(script).parent)]
    sys.path[:] = folder + _paths
    if "numpy" in sys.modules:  # Otherwise, scripts that set no seed would draw equal numbers.
        sys.modules["numpy"].random.seed()
    main: Any = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    code = compile(Path(script).read_bytes(), script, "exec")
    # ruff: ignore[exec-builtin] -- the user's own script
    sys.exit(status_of(lambda: exec(code, vars(main))))


def status_of(program: Callable[[], None]) -> int:
    """Return the exit status of a program, after running it and Python's exit functions."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # Hide the frames of this module.
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        status = 1
    # In a fork, multiprocessing would call these two functions too late or not at all.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    return status & 255


class Fork:
    """A Python script that runs in a fork, with the variables in ``environment``."""

    def __init__(
        self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        start()
        given = str(script), list(arguments), dict(environment)
        self._process = _context.Process(target=_run, args=given)
        main = vars(sys.modules["__main__"])
        with _lock:
            file = main.pop("__file__", None)  # Otherwise, the fork would run this file first.
            try:
                self._process.start()
                # Otherwise, Python would wait at exit for a script that Ctrl-C has not ended.
                process._children.discard(self._process)  # pyright: ignore[reportAttributeAccessIssue]
            finally:
                main |= {} if file is None else {"__file__": file}
        self.pid: Any = self._process.pid
        _running.add(self.pid)

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit status as ``subprocess`` does, or None if ``seconds`` have passed."""
        if not connection.wait([self._process.sentinel], seconds):
            return None
        with _lock:
            _running.discard(self.pid)
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self.wait()

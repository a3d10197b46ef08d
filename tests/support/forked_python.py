"""Python whose imports are done, as a program: a fork of one process for each.

Snakemake itself and its jobs are such programs in the tests. A program has its own folder,
environment, open files and paths of modules, and imports `trak_core` itself where these lead to a
copy of it. It has the server's hashes of strings and all that libraries read when they are imported
(OMP_NUM_THREADS, NUMBA_*), and the server's limits.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

from snakemake_executor_plugin_forks.server import NO_ARROW_THREAD, THREADS, status_of

# What jobs and Snakemake take most of their time to import.
PRELOADED = (
    "h5py",
    "jsonschema",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "nbformat",
    "numba",
    "numpy",
    "pandas",
    "peft",
    "scipy.linalg",
    "sklearn.datasets",
    "smart_open",
    "snakemake.cli",
    "tables",
    "torch.func",
    "torch.utils.data",
    "transformers.models.llama.modeling_llama",
    "warmed_snakemake",
)
# The program; its own start is a hundredth of what it saves. It passes on its open files, which
# multiprocessing leaves to what it starts, and signals.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
while arguments and arguments[0] == "-B":
    del arguments[0]
if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-P")):
    os.execv({python!r}, [{python!r}, *arguments])
server = socket.socket(socket.AF_UNIX)
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [n for n in files if n != server.fileno() and os.path.exists(f"/proc/self/fd/{{n}}")]
server.connect("\\0{server}")
told = json.dumps([__file__, dict(os.environ), os.getcwd(), arguments, files]).encode()
socket.send_fds(server, [len(told).to_bytes(8, "big")], files)
server.sendall(told)
answers = server.makefile("rb")
process = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(process, number))
status = int(answers.readline())
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def start_server(folder: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    """Return the program `python`, and the server's process, which ends with its standard input."""
    name = f"trak-{secrets.token_hex(16)}"
    server = subprocess.Popen(
        [sys.executable, "-c", f"import forked_python; forked_python.serve({name!r})"],
        cwd="/",
        env=os.environ | dict.fromkeys(THREADS, "1") | NO_ARROW_THREAD,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.read(1), "the server of forks does not listen"
    program = folder / "python"
    program.write_text(_CLIENT.format(python=sys.executable, server=name))
    program.chmod(0o755)
    return program, server


def serve(name: str) -> None:
    """Import, and fork for each program until standard input ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(1024)
        os.write(1, b"y")
        os.dup2(2, 1)
        gc.disable()
        for module in PRELOADED:
            importlib.import_module(module)
        gc.enable()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _look_after(connection)
            connection.close()


def _look_after(connection: socket.socket) -> None:
    """Fork once more, for the program, and say how that ends; kill it if nobody wants to know."""
    size, files, _, _ = socket.recv_fds(connection, 8, 250)
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += connection.recv(2**16)
    *asked, numbers = json.loads(told)
    process = os.fork()
    if process == 0:
        connection.close()
        _take_files(files, numbers)
        os.setpgid(0, 0)
        # As from a terminal, though tests may run in the background, where it is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = status_of(lambda: run(*asked))
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(status)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % process)
    handle = os.pidfd_open(process)
    if handle not in select.select([handle, connection], [], [])[0]:
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Have files under the numbers that they have where the program was called."""
    above = max([*files, *numbers]) + 1
    for i, file in enumerate(files):
        os.dup2(file, above + i)
        os.close(file)
    for i, number in enumerate(numbers):
        os.dup2(above + i, number, inheritable=number < 3)
        os.close(above + i)


def run(program: str, environment: dict[str, str], folder: str, arguments: list[str]) -> None:
    """Be what `python ARGUMENTS` would be."""
    # Programs that programs start go through here too.
    sys.executable = program
    multiprocessing.set_executable(program)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.path[:] = [path for path in sys.path if path not in ("", "/", str(Path(__file__).parent))]
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = map(os.path.abspath, given)  # as Python does when it starts
    # With -P the working folder, or that of the program, is not in sys.path.
    is_safe = arguments[0] == "-P" or "PYTHONSAFEPATH" in environment
    arguments = arguments[arguments[0] == "-P" :]
    is_file = arguments[0] not in ("-c", "-m")
    if not is_safe:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent if is_file else Path.cwd()))
    # A program may have a copy of the code, edited.
    code = PathFinder.find_spec("trak_core")
    if code is None or code.origin != sys.modules["trak_core"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "trak_core"]:
            del sys.modules[name]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    elif not is_file:
        sys.argv = arguments[1:]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):  # a package's __main__ runs
            sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

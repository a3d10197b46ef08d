"""Python whose imports are done: it forks for every program; run by workspace.py.

    python forked_python.py SOCKET

listens there for programs. Each comes as JSON, [folder, environment, arguments], with its standard
streams, and its exit status goes back. Folder, environment, path of modules and `trak_core`, which
is never imported here, are a program's own. This server's are what an interpreter and its libraries
look at when they start (hashes of strings, OMP_NUM_THREADS, NUMBA_*), limits, and the parent:
Snakemake's benchmarks measure the client.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path

# What jobs and Snakemake take most of their time to import.
PRELOADED = (
    "h5py",
    "jsonschema",
    "matplotlib.pyplot",
    "numba",
    "numpy",
    "pandas",
    "scipy.linalg",
    "sklearn.datasets",
    "snakemake.cli",
    "tables",
    "torch.func",
    "torch.utils.data",
)
# The program that asks for another; its own start is a hundredth of what it saves.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
    os.execv({python!r}, [{python!r}, *arguments])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({socket!r})
    request = json.dumps([os.getcwd(), dict(os.environ), arguments]).encode()
    socket.send_fds(connection, [len(request).to_bytes(8)], [0, 1, 2])
    connection.sendall(request)
    status = int(connection.recv(8) or sys.exit("forked_python.py has lost this program"))
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def run(folder: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Be what `python ARGUMENTS` would be."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module("numpy").random.seed()
    before = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = before
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if arguments[0] == "-m":
        sys.path[0], sys.argv = folder, arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(arguments[0]).resolve().parent), arguments
        runpy.run_path(arguments[0], run_name="__main__")


def status_of(folder: str, environment: dict[str, str], arguments: list[str]) -> int:
    """Run a program to its end, but for what Python would clean up: that takes seconds here."""
    status = 0
    try:
        run(folder, environment, arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 255


def keep(connection: socket.socket) -> None:
    """Fork for one program and tell how it ended; it ends with the client, if that is killed."""
    size, streams, *_ = socket.recv_fds(connection, 8, 3)
    n_bytes = int.from_bytes(size)
    request = b""
    while len(request) < n_bytes:
        part = connection.recv(n_bytes - len(request))
        if not part:
            return
        request += part
    child = os.fork()
    if child == 0:
        os.setsid()
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os._exit(status_of(*json.loads(request)))
    for stream in streams:
        os.close(stream)

    def end_with_client() -> None:
        if not connection.recv(1):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    threading.Thread(target=end_with_client, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(str(status).encode())


def main() -> None:
    """Listen, and print the program to start others with."""
    path = sys.argv[1]
    answer = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    for name in PRELOADED:
        importlib.import_module(name)
    client = Path(path).with_name("python")
    client.write_text(CLIENT.format(python=sys.executable, socket=path))
    client.chmod(0o755)
    # Programs that programs start go through here too.
    sys.executable = str(client)
    gc.freeze()  # or every fork would copy what a collection looks at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(answer, f"{client}\n".encode())
        os.close(answer)
        # Nothing ever comes on standard input: it ends with the process that started this one.
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    with contextlib.suppress(OSError):
                        keep(connection)
                    os._exit(0)
    os._exit(0)


if __name__ == "__main__":
    main()

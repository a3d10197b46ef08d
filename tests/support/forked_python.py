"""Python whose imports are done, as a program: the product's fork server forks for each.

Snakemake itself and its jobs are such programs in the tests. A program has its own folder,
environment and paths of modules, and imports `trak_core` itself where these lead to a copy of it.
It has the server's hashes of strings and all that libraries read when they are imported
(OMP_NUM_THREADS, NUMBA_*), and the server's limits.
"""

import contextlib
import importlib
import os
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

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
# The program; its own start is a hundredth of what it saves.
_CLIENT = """#!{python} -IS
import os, sys
arguments = sys.argv[1:]
if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-P")):
    os.execv({python!r}, [{python!r}, *arguments])
sys.path.append({repository!r})
from trak_core.system.fork_client import end_as, status_of_fork
call = ["forked_python:run", [__file__, dict(os.environ), arguments]]
status = status_of_fork({server!r}, {{"folder": os.getcwd(), "call": call}})
end_as(status) if status is not None else sys.exit("no fork of Python could be had")
"""


def write_program(folder: Path, server: str) -> Path:
    """Write the program `python` for the server with this socket."""
    program = folder / "python"
    repository = str(Path(__file__).parents[2])
    program.write_text(_CLIENT.format(python=sys.executable, repository=repository, server=server))
    program.chmod(0o755)
    return program


def run(asked: list[Any]) -> None:
    """Be what `python ARGUMENTS` would be."""
    # Programs that programs start go through here too.
    sys.executable, environment, arguments = asked
    os.environ.clear()
    os.environ.update(environment)
    sys.path.remove(str(Path(__file__).parent))
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = map(os.path.abspath, given)  # as Python does when it starts
    is_safe = arguments[0] == "-P"  # nothing is imported from the folder or beside the program
    arguments = arguments[is_safe:]
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

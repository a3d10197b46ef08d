"""Run one job of a Snakemake rule: convert values, call a function (the stage), and write a log.

The first word of the param ``code`` is the name of the stage. The files, params, resources and
wildcards of a job also have names. The stage gets those that have the names of its arguments.
"""

import atexit
import contextlib
import ctypes
import importlib
import inspect
import logging
import os
import signal
import sys
import sysconfig
import threading
import typing
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trak_core.errors import InputError, StoppedError, caused_by_out_of_memory, disk_full_reason


def _call_glibc(name: str, *arguments: int) -> None:
    """Call a function of the C library. If there is no such function, do nothing."""
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function(*arguments)


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed heap memory, unless the user has configured the heap.

    Otherwise, the kernel would have to map and zero the same pages again for each batch.
    """
    is_set = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if not is_set and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        _call_glibc("mallopt", -1, 2**28)  # M_TRIM_THRESHOLD
        _call_glibc("mallopt", -3, 2**25)  # M_MMAP_THRESHOLD, at most 32 MiB


def release_freed_memory() -> None:
    """Return freed heap memory to the kernel. Call this after freeing a large temporary array."""
    _call_glibc("malloc_trim", 0)


def export_library_path() -> None:
    """Make new processes import this copy of trak_core, even if another copy is installed."""
    library = str(Path(__file__).parents[2])
    others = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if library not in sysconfig.get_paths().values() and others[:1] != [library]:
        os.environ["PYTHONPATH"] = os.pathsep.join([library, *others])


def quiet_libraries() -> None:
    """Turn off Hugging Face's progress bars, and all libraries' warnings about future versions.

    Warnings are not changed if the user has set ``python -W`` or ``PYTHONWARNINGS``.
    """
    # TQDM_DISABLE is not used, because it would also hide progress bars of the user's study.
    for library in ("HUB", "DATASETS"):
        os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)


_STOP_REASONS = {
    signal.SIGTERM: "which is sent to jobs that are cancelled, preempted or out of time",
    signal.SIGINT: "which Ctrl-C sends",
}


def _stop(number: int, _frame: FrameType | None) -> None:
    # Further signals are ignored, because they would interrupt the deletion of unfinished files.
    for each in _STOP_REASONS:
        signal.signal(each, signal.SIG_IGN)
    stop = signal.Signals(number)
    report = sys.unraisablehook

    def repeat(ignored: "sys.UnraisableHookArgs") -> None:
        """Send the signal again if Python ignored ``StoppedError``, as it does in ``__del__``."""
        if isinstance(ignored.exc_value, StoppedError):
            sys.unraisablehook = report
            stop_cleanly()
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        else:
            report(ignored)

    sys.unraisablehook = repeat
    # StoppedError is not a subclass of Exception, so `except Exception` does not catch it.
    raise StoppedError(
        f"Error: the job was stopped by {stop.name}, {_STOP_REASONS[stop]}. Its unfinished files "
        "were deleted. Run snakemake again. Finished files are kept."
    )


def stop_cleanly() -> None:
    """Make SIGTERM and SIGINT (Ctrl-C) raise ``StoppedError`` in the main thread."""
    for number in _STOP_REASONS:
        signal.signal(number, _stop)


def explain_interrupts(results: str, *, is_main: bool) -> None:
    """Make Ctrl-C end Snakemake with a message about finished files instead of tracebacks.

    Snakemake still waits for running jobs and unlocks the working folder. A second Ctrl-C ends the
    wait. A SIGINT handler that other code has set is not replaced. The message is printed only if
    ``is_main`` is true, which is the case in the Snakemake process that the user started.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    goodbye = (
        f"Stopped by Ctrl-C. Finished files are kept in {results}, and unfinished files were "
        "deleted. To continue, run the same command again."
    )

    def exit_without_waiting() -> None:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGINT)

    def end_at_once(_number: int, _frame: FrameType | None) -> None:
        # SystemExit ends Snakemake's wait and unlocks the folder. At exit, Python would then wait
        # for the threads of all running jobs, unless the registered function ends the process.
        try:
            threading._register_atexit(  # pyright: ignore[reportAttributeAccessIssue]
                exit_without_waiting
            )
        except RuntimeError:  # Python is exiting: Snakemake has already unlocked the folder.
            exit_without_waiting()
        raise SystemExit(128 + signal.SIGINT)

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end_at_once)
        # Without this, Snakemake would report that every interrupted job failed. The logs of these
        # jobs contain the reason.
        logging.disable(logging.CRITICAL)
        if is_main:
            print("\nStopping after Ctrl-C: waiting for jobs to clean up.", file=sys.stderr)
            atexit.register(print, goodbye, file=sys.stderr)
        # Snakemake's scheduler handles SystemExit like KeyboardInterrupt.
        raise SystemExit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, end)


_MORE_MEMORY = (
    "Lower compute.memory_mb, which limits the size of arrays, or compute.batch_size. Or give the "
    "job more memory. A job needs compute.memory_mb, plus 1500 MiB for torch and the study's data, "
    "plus the weights of a large model. On a cluster, use --set-resources RULE:mem_mb=... "
    "On one machine, run fewer jobs at the same time (--cores)."
)


def _explained(error: Exception) -> str | None:
    """Return a message that explains how to correct an error, or None for an unexpected error."""
    if isinstance(error, InputError):
        return str(error)
    if reason := disk_full_reason(error):
        return (
            f"the disk must have space for a job's files and log. Found: {reason}. Free some "
            "space, or raise the quota or limit. Then run snakemake again. Finished files are kept."
        )
    if caused_by_out_of_memory(error):
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        return f"the job must have enough memory. It ran out of memory: {reason} {_MORE_MEMORY}"
    return None


def _write_error(message: str, terminal: int) -> None:
    """Write an error message to the log, or to ``terminal`` if the disk of the log is full."""
    # A file name in the message can contain bytes that are not valid UTF-8.
    text = f"Error: {message}\n".encode(errors="backslashreplace")
    for descriptor in (2, terminal):
        with contextlib.suppress(OSError):
            if os.write(descriptor, text) == len(text):
                return


@contextmanager
def logged_to(path: str) -> Generator[None, None, None]:
    """Redirect standard output and error, including the output of C libraries, to a job's log file.

    On SIGTERM or Ctrl-C, the job ends, its unfinished files are deleted, and a message is written
    to the log.

    Raises:
        SystemExit: In place of an ``InputError``, or of an error for a full disk or too little
            memory. The log then contains a message without a traceback.
    """
    stop_cleanly()
    terminal = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    quiet_libraries()
    keep_freed_memory()
    try:
        yield
        sys.stdout.flush()  # If the disk of the log is full, the error is raised and handled here.
    except Exception as error:
        message = _explained(error)
        if message is None:
            raise
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _write_error(message, terminal)
        if disk_full_reason(error) is not None:
            # At a normal exit, HDF5 would try to write the file again, and crash.
            os._exit(1)
        raise SystemExit(1) from None


# Snakemake runs a job again if one of these params changes. Stages need not accept them.
_TRIGGERS = {"code", "signature", "digest"}
# The modules of stages that are not in the module with the stage's name.
_MODULES = {
    "compute_embeddings": "compute_outputs",
    "compute_exact_scores": "compute_scores",
    "compute_normal_matrix": "compute_scores",
    "compute_self_influence": "compute_scores",
    "find_duplicates": "write_list",
    "show_list": "draw_influences",
}


def stage_module(name: str) -> str:
    """Return the dotted name of the module that contains the stage ``name``."""
    return f"trak_core.stages.{_MODULES.get(name, name)}"


def stage_of(name: str) -> Callable[..., None]:
    """Return the function of the stage ``name``."""
    return getattr(importlib.import_module(stage_module(name)), name)


def convert_param(value: Any, hint: Any) -> Any:
    """Return a value from Snakemake, converted to ``hint``, the annotation of a parameter."""
    from trak_core.settings import FeaturesSpec, NormalSpec, RetrainedSpec, ScoresSpec, parse_spec

    kinds = (hint, *typing.get_args(hint))
    if value is None:
        return None
    for spec in {FeaturesSpec, NormalSpec, ScoresSpec, RetrainedSpec}.intersection(kinds):
        return parse_spec(spec, value)
    if Path in kinds:
        return Path(value) if isinstance(value, str) else [Path(path) for path in value]
    return int(value) if hint is int else value


def import_stages() -> None:
    """Import all stages and the modules that they use, so that forked jobs start at once."""
    quiet_libraries()
    stages = Path(__file__).parents[1] / "stages"
    names = [f"trak_core.stages.{file.stem}" for file in stages.glob("[a-z]*.py")]
    # Stages import pandas, tables and Matplotlib only when they need them, so they are added here.
    for name in (*names, "pandas", "tables", "matplotlib.backends.backend_agg"):
        importlib.import_module(name)
    importlib.import_module("trak_core.projection.cpu.project").load_compiler()


def run_script(job: Any) -> None:
    """Run the job of a script, and write everything that it prints to the job's log."""
    with logged_to(job.log[0]):
        run(job)


def run(job: Any) -> None:
    """Call the stage of a job.

    It gets the job's files, params, resources and wildcards that have the names of its arguments.
    """
    specified = {**dict(job.params.items()), **dict(job.input.items()), **dict(job.output.items())}
    values = {"threads": job.threads, **dict(job.wildcards.items()), **dict(job.resources.items())}
    # If an input file has the same name as a wildcard, the stage gets the file.
    values |= specified
    name, values["code"] = values["code"].split()
    stage = stage_of(name)
    parameters = inspect.signature(stage).parameters
    if unknown := specified.keys() - parameters.keys() - _TRIGGERS:
        names = ", ".join(sorted(unknown))
        raise TypeError(f"The stage of rule {job.rule} must have the arguments {names}")
    hints = typing.get_type_hints(stage)
    accepted = [name for name in parameters if name in values]
    stage(**{name: convert_param(values[name], hints[name]) for name in accepted})

"""Run a job: from its rule to its stage, with a log, one message for an error, and a clean stop.

What a rule names is what its stage takes; nothing else knows Snakemake's objects. The param
``code`` says which stage: a workflow that uses this one as a module may rename its rules.
"""

import atexit
import contextlib
import ctypes
import importlib
import inspect
import logging
import os
import pkgutil
import signal
import site
import sys
import sysconfig
import threading
import typing
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trak_core.errors import InputError, ToldToStopError, came_from_no_memory, no_room

# glibc's options, with the bytes that may lie free at the heap's end, and those of an array that is
# taken from the heap, of which glibc allows no more.
_OPTIONS = {"M_TRIM_THRESHOLD": (-1, 2**28), "M_MMAP_THRESHOLD": (-3, 2**25)}
_HEAP_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


def keep_freed() -> None:
    """Have the C library keep up to 256 MiB that lie free at its heap's end, where it is glibc.

    Else every batch's tensors go back to the system, which gives them out again page by page,
    filled with zeros. What the user has set for glibc's heap comes first.
    """
    is_set = not _HEAP_VARIABLES.isdisjoint(os.environ)
    is_set |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not is_set:
        for option in _OPTIONS.values():
            mallopt(*option)


def return_freed() -> None:
    """Give back what lies free in the C library's heap: what is used once goes before the rest."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


# Libraries look at these when they are imported. Not TQDM_DISABLE: a study's own bars stay.
_NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_FUTURE_WARNINGS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
_OURS = str(Path(__file__).parents[1])


def name_library() -> None:
    """Have processes that this one starts import the trak_core that it has imported.

    They find an installed one without help.
    """
    library = str(Path(__file__).parents[2])
    others = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if library not in sysconfig.get_paths().values() and others[:1] != [library]:
        os.environ["PYTHONPATH"] = os.pathsep.join([library, *others])


def is_installed(filename: str) -> bool:
    """Whether code is Python's own or a library's: not the user's, nor ours."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), "<frozen "]
    return filename.startswith(tuple(folders)) and not filename.startswith(_OURS)


def quiet_libraries() -> None:
    """Have no bars of loading, nor warnings of a future version about a library's own code.

    A warning about the study's code, which a library blames on the line that called it, is shown.
    With ``python -W`` or ``PYTHONWARNINGS`` all are.
    """
    for name in _NO_BARS:
        os.environ.setdefault(name, "1")
    if sys.warnoptions:
        return
    shown = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *args: Any, **kwargs: Any) -> None:
        if not (issubclass(category, _FUTURE_WARNINGS) and is_installed(filename)):
            shown(message, category, filename, *args, **kwargs)

    warnings.showwarning = show


# The signals that tell a job to stop, and who sends them.
_STOPS = {
    signal.SIGTERM: "as when it is cancelled, preempted or out of time",
    signal.SIGINT: "by Ctrl-C",
}
# What a job says that ran longer than it may, and the seconds that it then has to clear up.
_too_late: str | None = None
_CLEARING_SECONDS = 30.0
# Snakemake's own measurements are samples, which may miss it.
PEAK = "peak memory: "
_ASK_AGAIN_SECONDS = 0.2
_THREADS_SECONDS = 5.0


def _is_stopping() -> bool:
    """Return whether the stop is on its way up, so that what runs now is clearing up."""
    error = sys.exception()
    while error is not None and not isinstance(error, ToldToStopError):
        error = error.__context__
    return error is not None


def _insist(message: str) -> None:
    """Raise the stop again and again: Python drops what is raised in ``__del__`` and callbacks."""
    tell = sys.unraisablehook

    def tell_others(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, ToldToStopError):
            tell(dropped)

    def stop_again(_number: int, _frame: FrameType | None) -> None:
        if not _is_stopping():
            raise ToldToStopError(message)

    sys.unraisablehook = tell_others
    if os.name == "posix":
        signal.signal(signal.SIGALRM, stop_again)
        signal.setitimer(signal.ITIMER_REAL, _ASK_AGAIN_SECONDS, _ASK_AGAIN_SECONDS)
        atexit.register(end_insisting)


def end_insisting() -> None:
    """Let the process end in peace: the stop has come through, or there is no more to stop."""
    if os.name == "posix":
        signal.setitimer(signal.ITIMER_REAL, 0)


def _stop(number: int, _frame: FrameType | None) -> None:
    # A second signal, from whoever started this job, would cut its clearing up short.
    for each in _STOPS:
        signal.signal(each, signal.SIG_IGN)
    stop = signal.Signals(number)
    message = _too_late or (
        f"Error: the job was told to stop ({stop.name}), {_STOPS[stop]}. It "
        "left nothing half-written. Run snakemake again: what is finished stays."
    )
    _insist(message)
    # Not an Exception: no code that tries another way may catch it.
    raise ToldToStopError(message)


def stop_cleanly() -> None:
    """Turn SIGTERM and Ctrl-C into an ordinary end of this process, with one sentence."""
    for number in _STOPS:
        signal.signal(number, _stop)


def _watch(minutes: float, terminal: int, ended: threading.Event) -> None:
    """Tell the job to stop when its minutes are over, and end it where it can't hear that."""
    global _too_late
    if ended.wait(60 * minutes):
        return
    _too_late = (
        f"Error: a job must end within compute.minutes, {minutes:g}. It took longer, and left "
        "nothing half-written. If a sample or a file does not hang, raise compute.minutes, or cut "
        "the work into shards, and run snakemake again: what is finished stays."
    )
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    if not ended.wait(_CLEARING_SECONDS):  # within code that is not Python
        _say(_too_late.removeprefix("Error: "), terminal)
        os._exit(1)


def run_to_the_end(work: Callable[[], None]) -> None:
    """Do a process's last work; the process ends even if the work left threads running.

    They have some seconds to end, after which the process says on standard error which did not.
    """
    status = 1

    def end_without_threads() -> None:
        main, current = threading.main_thread(), threading.current_thread()
        others = (t for t in threading.enumerate() if t not in {main, current} and not t.daemon)
        left = [thread.name for thread in others]
        if not left:  # what still runs is the end of the process
            return
        print(
            f"Threads were left running, and are not waited for after {_THREADS_SECONDS:.0f} s: "
            f"{', '.join(left)}. Join each thread, or make it a daemon.",
            file=sys.stderr,
        )
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 255)

    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        end_insisting()
        timer = threading.Timer(_THREADS_SECONDS, end_without_threads)
        timer.daemon = True
        timer.start()


def _end_before_jobs(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"\nStopped by Ctrl-C before any job began.\n")
    os._exit(128 + signal.SIGINT)


def stop_before_jobs() -> None:
    """Have Ctrl-C end this process with one line, until ``explain_interrupts`` takes over.

    So does one that was held back until now.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _end_before_jobs)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def explain_interrupts(results: str, *, is_main: bool) -> None:
    """Have Ctrl-C end this Snakemake with what is kept and how to go on, in place of tracebacks.

    Snakemake still waits for running jobs to clear up, and unlocks the folder. Another Ctrl-C
    stops the waiting. A program that has its own handler of SIGINT keeps it. Only
    the Snakemake that the user started (``is_main``) speaks; those that it starts for jobs don't.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _end_before_jobs):
        return
    goodbye = (
        f"Stopped by Ctrl-C. What is finished stays in {results}, and nothing there is "
        "half-written. To go on, run the same command again."
    )

    def end_at_once(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGINT)

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end_at_once)
        # What Snakemake says of jobs that end now is no news: each has the reason in its log.
        logging.disable(logging.CRITICAL)
        if is_main:
            print("\nStopping by Ctrl-C: running jobs clear up first.", file=sys.stderr)
            atexit.register(print, goodbye, file=sys.stderr)
        # Snakemake's scheduler takes it like a KeyboardInterrupt; elsewhere it has no traceback.
        raise SystemExit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, end)


MORE_MEMORY = (
    "Lower compute.memory_mb, to which arrays are cut, or compute.batch_size; or give the job more "
    "than compute.memory_mb + 1500 MiB, of which torch and the study's own data take the 1500, and "
    "a large model's weights: on a cluster by --set-resources RULE:mem_mb=..., on one machine by "
    "fewer jobs at once (--cores)."
)


def _explained(error: Exception) -> str | None:
    """Return what to do about an error, or None for a defect of ours."""
    if isinstance(error, InputError):
        return str(error)
    reason = no_room(error)
    if reason is not None:
        return (
            f"the disk must hold what a job writes, its log too. Found: {reason}. Make room, or "
            "raise the quota or limit, and run snakemake again: what is finished stays."
        )
    if came_from_no_memory(error):
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        return f"the job's memory must hold its work. It ran out: {reason} {MORE_MEMORY}"
    return None


def _say(message: str, terminal: int) -> None:
    """Write to the log, and to what it took the place of if the log's disk is full."""
    # A file's name need not be text.
    text = f"Error: {message}\n".encode(errors="backslashreplace")
    for descriptor in (2, terminal):
        with contextlib.suppress(OSError):
            if os.write(descriptor, text) == len(text):
                return


def _peak_mib() -> float | None:
    """Return the most resident memory of this process so far; None where Linux doesn't say."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return None


@contextmanager
def logged_to(path: str, minutes: float | None = None) -> Generator[None, None, None]:
    """Send all that the job prints to its log file, C libraries and tracebacks included.

    The file is emptied first. Left out are progress bars of other libraries, and their warnings
    about future versions. SIGTERM and Ctrl-C become an ordinary end: what was begun is deleted, and
    the log says so. So does a job that is not over after some ``minutes``. The last line of a job
    that ended well is its peak memory.

    Raises:
        SystemExit: In place of an ``InputError``, a full disk or memory that ran out, whose message
            goes to the log without traceback.
    """
    stop_cleanly()
    terminal = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    quiet_libraries()
    keep_freed()
    ended = threading.Event()
    if minutes is not None:
        threading.Thread(target=_watch, args=(minutes, terminal, ended), daemon=True).start()
    try:
        yield
        peak = _peak_mib()
        if peak is not None:
            print(f"{PEAK}{peak:.0f} MiB", flush=True)
    except Exception as error:
        message = _explained(error)
        if message is None:
            raise
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _say(message, terminal)
        if no_room(error) is not None:
            # HDF5 would try to write once more on the way out, and crash.
            os._exit(1)
        raise SystemExit(1) from None
    finally:
        ended.set()
        end_insisting()


# Params that decide whether a job runs again, whether or not its stage takes them.
_TRIGGERS = {"code", "signature", "digest"}
# What jobs import only when they come to it, and a function that imports more.
_LATER = ("pandas", "tables", "matplotlib.backends.backend_agg")
_LOAD_COMPILER = "trak_core.projection.cpu.project:load_compiler"


# Stages that lie in the module of another, because the two do one thing in several ways.
_LIES_WITH = {
    "average_targets": "compute_scores",
    "compute_embeddings": "compute_outputs",
    "compute_exact_scores": "compute_scores",
    "compute_newton_scores": "compute_gramian",
    "compute_normal_matrix": "compute_scores",
    "compute_self_influence": "compute_scores",
    "find_duplicates": "write_list",
    "show_list": "draw_influences",
}


def stage_module(name: str) -> str:
    """Return the dotted name of the module that a stage lies in: most have one of their own."""
    return f"trak_core.stages.{_LIES_WITH.get(name, name)}"


def stage_of(name: str) -> Callable[..., None]:
    """Return a stage, by its name."""
    return getattr(importlib.import_module(stage_module(name)), name)


def _specs() -> tuple[type[Any], ...]:
    """Return the kinds of specs."""
    from trak_core.spec import FeaturesSpec, NormalSpec, RetrainedSpec, ScoresSpec

    return FeaturesSpec, NormalSpec, ScoresSpec, RetrainedSpec


def convert_param(value: Any, hint: Any) -> Any:
    """Return what Snakemake passes (texts, plain values) as what a stage takes, by its type."""
    from trak_core.spec import parse_spec

    kinds = (hint, *typing.get_args(hint))
    if value is None:
        return None
    for spec in _specs():
        if spec in kinds:
            return parse_spec(spec, value)
    if Path in kinds:
        return Path(value) if isinstance(value, str) else [Path(path) for path in value]
    return int(value) if hint is int else value


def describe_job(job: Any) -> dict[str, Any]:
    """Return what Snakemake's object of a script says of a job.

    ``own`` holds the names of the rule's own files and params among all that is ``named``.
    """
    named: dict[str, Any] = {"threads": job.threads}
    # What a rule says of its files counts most: a wildcard is named `checkpoint` as well.
    for group in (job.wildcards, job.resources, job.params, job.input, job.output):
        named.update(group.items())
    own = [name for group in (job.params, job.input, job.output) for name in dict(group.items())]
    minutes = job.config["compute"].get("minutes")
    return {"rule": job.rule, "log": job.log[0], "minutes": minutes, "named": named, "own": own}


def import_stages() -> None:
    """Import what jobs of all stages import, those that they come to later too.

    The process that forks for jobs calls this (``trak_core.command.run``).
    """
    quiet_libraries()
    stages = Path(__file__).parents[1] / "stages"
    for file in stages.glob("[a-z]*.py"):
        importlib.import_module(f"trak_core.stages.{file.stem}")
    for name in _LATER:
        importlib.import_module(name)
    pkgutil.resolve_name(_LOAD_COMPILER)()


def run_script(job: Any) -> None:
    """Run a job from Snakemake's object of its script, with all that it prints in its log."""

    def work() -> None:
        described = describe_job(job)
        with logged_to(described["log"], described["minutes"]):
            run(described)

    stop_cleanly()
    run_to_the_end(work)


def run(job: Mapping[str, Any]) -> None:
    """Call a job's stage with what its rule names, which must be what the stage takes."""
    named = dict(job["named"])
    name, named["code"] = named["code"].split()
    stage = stage_of(name)
    parameters = inspect.signature(stage).parameters
    unknown = set(job["own"]) - parameters.keys() - _TRIGGERS
    if unknown:
        raise TypeError(f"rule {job['rule']} names {', '.join(sorted(unknown))}, not its stage's")
    hints = typing.get_type_hints(stage)
    taken = [name for name in parameters if name in named]
    stage(**{name: convert_param(named[name], hints[name]) for name in taken})

"""What every job does around its work: a log, and one message for an error that can be mended."""

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trak_core.errors import InputError, ToldToStopError
from trak_core.system.faults import came_from_no_memory, no_room
from trak_core.system.heap import keep_freed
from trak_core.system.quiet import quiet_libraries

# Snakemake's own measurements are of the process that it started, which may wait for another.
PEAK = "peak memory: "


def _stop(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a second one, of whoever started this job, would cut its clearing up short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Not an Exception: no code that tries another way may catch it.
    raise ToldToStopError(
        "Error: the job was told to stop (SIGTERM), as when it is cancelled, preempted or out of "
        "time. It left nothing half-written. Run snakemake again: what is finished stays."
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
        found = (str(error).splitlines() or [""])[0] or type(error).__name__
        return (
            f"the job's memory must hold its work. It ran out: {found} Lower compute.memory_mb, to "
            "which arrays are cut, or compute.batch_size; or give the job more than "
            "compute.memory_mb + 1500 MiB, of which torch and the study's own data take the 1500: "
            "on a cluster by --set-resources RULE:mem_mb=..., on one machine by fewer jobs at once "
            "(--cores)."
        )
    return None


def _say(message: str, terminal: int) -> None:
    """Write to the log, and to what it took the place of if the log's disk is full."""
    text = f"Error: {message}\n".encode()
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
def logged_to(path: str) -> Generator[None, None, None]:
    """Send all that the job prints to its log file, C libraries and tracebacks included.

    But for progress bars and warnings of the future of other libraries, which come with no news.
    SIGTERM becomes an ordinary end: what was begun is deleted, and the log says so. The last line
    of a job that ended well is its peak memory.

    Args:
        path: The log file, emptied first.

    Raises:
        SystemExit: In place of an ``InputError``, a full disk or memory that ran out, whose message
            goes to the log without traceback.
    """
    signal.signal(signal.SIGTERM, _stop)
    terminal = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    quiet_libraries()
    keep_freed()
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

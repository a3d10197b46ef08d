"""The threads of OpenMP in this process: those that torch computes on."""

import ctypes
import os
from multiprocessing import parent_process

# In a process that multiprocessing forked, OpenMP may have been used before this was imported.
_OWN = os.getpid() if parent_process() is None else None
_SOFT = 1  # omp_pause_soft: what the user set for OpenMP stays


def rest() -> None:
    """Have OpenMP's threads end, or sleep, until this thread has work for them again.

    After their last work they go on looking for more, for milliseconds, each on a core that other
    threads could use. To start one anew takes less than a tenth of a millisecond. Nothing happens
    where no OpenMP of version 5.0 or later is loaded, as without torch, nor in a forked process,
    where GNU's would wait for ever for threads that stayed behind. A fork by ``os.fork`` that
    imports this first is not noticed.

    Source: OpenMP 5.0, ``omp_pause_resource_all``.
    """
    if os.name != "posix" or os.getpid() != _OWN:
        return
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT)

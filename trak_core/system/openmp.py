"""The threads of OpenMP in this process: those that torch computes on."""

import ctypes
import os

_PROGRAM = ctypes.CDLL(None) if os.name == "posix" else None
_SOFT = 1  # omp_pause_soft: what the user set for OpenMP stays
_forked: list[bool] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forked.append(True))


def rest() -> None:
    """Have OpenMP's threads end until this thread has work for them again.

    After their last work they go on looking for more, for milliseconds, each on a core that other
    threads could use. To start them anew takes a tenth of a millisecond. Nothing happens where no
    OpenMP of version 5.0 or later is loaded, as without torch, nor in a forked process, where it
    would wait for threads that stayed behind.

    Source: OpenMP 5.0, ``omp_pause_resource_all``.
    """
    pause = getattr(_PROGRAM, "omp_pause_resource_all", None)
    if pause is not None and not _forked:
        pause(_SOFT)

"""The memory that a job has freed, and will want again for its next batch."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 2**28  # bytes that may lie idle
_LARGEST = 2**25  # bytes of an array that is taken from what was kept; glibc allows no more
_BY_THE_USER = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


def keep_freed() -> None:
    """Have the C library keep what is freed, up to 256 MiB, where that is glibc.

    Else every batch's tensors go back to the system, which gives them out again page by page,
    filled with zeros. What the user has set for glibc comes first.
    """
    if os.name != "posix" or _BY_THE_USER & set(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)

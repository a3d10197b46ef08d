"""The memory that a job has freed, and will want again for its next batch."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 2**28  # bytes that may lie free at the end of the heap
_LARGEST = 2**25  # bytes of an array that is taken from the heap; glibc allows no more
_OF_THE_HEAP = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


def keep_freed() -> None:
    """Have the C library keep up to 256 MiB that lie free at its heap's end, where it is glibc.

    Else every batch's tensors go back to the system, which gives them out again page by page,
    filled with zeros. What the user has set for glibc's heap comes first.
    """
    by_the_user = not _OF_THE_HEAP.isdisjoint(os.environ)
    by_the_user |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if os.name != "posix" or by_the_user:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)

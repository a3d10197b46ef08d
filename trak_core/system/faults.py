"""What a machine refuses in the midst of work: a full disk, no memory. Standard library only."""

import errno
import os
import re
from collections.abc import Iterator

# No space left, a quota used up, a file longer than its limit.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from: closing a file that failed raises another one."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def no_room(error: BaseException) -> str | None:
    """Return the system's words for a disk that took no more, or None for any other error.

    Args:
        error: Of Python or of a library that passes the system's number on in its text, as HDF5
            does; what it was raised from counts too.
    """
    for one in _chain(error):
        found = re.search(r"\berrno = (\d+)", str(one))
        number = int(found[1]) if found else getattr(one, "errno", None)
        if number in _NO_ROOM:
            return os.strerror(number)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's own type is a RuntimeError for a GPU's memory alone.
    text = str(error)
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in text
        or "out of memory" in text
    )


def came_from_no_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it came from, is a failed allocation."""
    return any(map(is_out_of_memory, _chain(error)))

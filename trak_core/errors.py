"""InputError, for what a user can put right; and whether memory or disk ran out."""

import errno
import os
import re
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """Something the user gave cannot be used.

    Its message stands alone: what must hold, what was found, what to do. Jobs print it without a
    traceback; any other exception is a defect of ours and keeps its traceback.

    Attributes:
        code: A stable name of the rule that was broken, such as ``"gradients.label_value"``: the
            words of a message may change, its code doesn't. None where no rule has a name yet.
    """

    def __init__(self, message: str, code: str | None = None):
        """Keep the code beside the message, which is all that ``str`` shows."""
        super().__init__(message)
        self.code = code


class ToldToStopError(SystemExit):
    """A job was stopped by SIGTERM or Ctrl-C: it ends as after ``sys.exit``, without a mistake."""


def listed(values: Iterable[object]) -> str:
    """Return at most eight values as text, and how many more there are."""
    texts = [str(value) for value in values]
    shown = ", ".join(texts[:8])
    return f"{shown} and {len(texts) - 8} more" if len(texts) > 8 else shown


# No space left, a quota used up, a file longer than its limit.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from: closing a file that failed raises another one."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def no_room(error: BaseException) -> str | None:
    """Return the system's words for a disk that took no more, or None for any other error.

    HDF5 has the system's number in its text. What the error was raised from counts too.
    """
    for cause in _chain(error):
        match = re.search(r"\berrno = (\d+)", str(cause))
        number = int(match[1]) if match else getattr(cause, "errno", None)
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
    is_named = type(error).__name__ == "OutOfMemoryError"
    is_told = any(words in str(error) for words in ("DefaultCPUAllocator", "out of memory"))
    return isinstance(error, RuntimeError) and (is_named or is_told)


def came_from_no_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it came from, is a failed allocation."""
    return any(map(is_out_of_memory, _chain(error)))

"""InputError, for errors that a user can correct, and tests for exhausted memory and disks."""

import errno
import os
import re
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """The user's input cannot be used.

    The message says what must hold, what was found and what to do. Jobs print it without a
    traceback. Any other exception is a bug and keeps its traceback.

    Attributes:
        code: A stable identifier of the broken rule, such as ``"gradients.label_value"``. The text
            of the message may change.
    """

    def __init__(self, message: str, code: str | None = None):
        """Store the code, which ``str`` doesn't show."""
        super().__init__(message)
        self.code = code


class StoppedError(SystemExit):
    """A job was stopped by SIGTERM or Ctrl-C. It is a ``SystemExit`` and ends the process."""


def listed(values: Iterable[object]) -> str:
    """Return at most eight values as text, and the number of further ones."""
    texts = [str(value) for value in values]
    shown = ", ".join(texts[:8])
    return f"{shown} and {len(texts) - 8} more" if len(texts) > 8 else shown


# No space left on the device, quota exceeded, file too large.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def disk_full_reason(error: BaseException) -> str | None:
    """Return the system's message if an error, or a cause of it, is a full disk; otherwise None."""
    for cause in _chain(error):
        match = re.search(r"\berrno = (\d+)", str(cause))  # in messages of HDF5
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
    # torch raises an OutOfMemoryError for a GPU, and a plain RuntimeError for the CPU.
    is_named = type(error).__name__ == "OutOfMemoryError"
    has_words = any(words in str(error) for words in ("DefaultCPUAllocator", "out of memory"))
    return isinstance(error, RuntimeError) and (is_named or has_words)


def caused_by_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or a cause of it, is a failed allocation."""
    return any(map(is_out_of_memory, _chain(error)))

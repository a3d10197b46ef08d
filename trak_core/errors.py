"""The exceptions of the package, and functions that recognize a lack of memory or disk space."""

import errno
import os
import re
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """The error for input that cannot be used. Jobs print the message without a traceback.

    Attributes:
        code: An identifier of the violated requirement, such as ``"gradients.label_value"``. Unlike
            the text of the message, the code does not change between versions.
    """

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.code = code


class StoppedError(SystemExit):
    """The exception that a job raises at SIGTERM or Ctrl-C. Like ``SystemExit``, it ends Python."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def listed(values: Iterable[object]) -> str:
    """Return a text that lists the first eight values, and the number of any further values."""
    texts = [str(value) for value in values]
    shown = ", ".join(texts[:8])
    return f"{shown} and {len(texts) - 8} more" if len(texts) > 8 else shown


# The error numbers of a full disk, an exceeded quota, and a file that is too large.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def disk_full_reason(error: BaseException) -> str | None:
    """Return the operating system's message if a full disk caused an error, else None."""
    for cause in _with_causes(error):
        match = re.search(r"\berrno = (\d+)", str(cause))  # HDF5's messages contain the number.
        number = int(match[1]) if match else getattr(cause, "errno", None)
        if number in _NO_ROOM:
            return os.strerror(number)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory on a CPU or a GPU could not be allocated."""
    if isinstance(error, MemoryError | OSError):
        return isinstance(error, MemoryError) or error.errno == errno.ENOMEM
    # torch raises an OutOfMemoryError for a GPU, and a plain RuntimeError for the CPU.
    is_named = type(error).__name__ == "OutOfMemoryError"
    has_words = any(words in str(error) for words in ("DefaultCPUAllocator", "out of memory"))
    return isinstance(error, RuntimeError) and (is_named or has_words)


def caused_by_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that memory could not be allocated."""
    return any(map(is_out_of_memory, _with_causes(error)))

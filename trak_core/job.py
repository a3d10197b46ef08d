"""What every job does around its work: a log, and one message for an input error."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from trak_core.errors import InputError


@contextmanager
def logged_to(path: str) -> Generator[None, None, None]:
    """Send all that the job prints to its log file, C libraries and tracebacks included.

    Args:
        path: The log file, emptied first.

    Raises:
        SystemExit: In place of an ``InputError``, whose message goes to the log without traceback.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        yield
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None

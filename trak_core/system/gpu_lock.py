"""One GPU for one process: the first that no other job of this user holds. No torch here."""

import os
import tempfile
import time
from functools import cache
from pathlib import Path

_LOOK_SECONDS = 1.0


@cache
def hold_one(names: tuple[str, ...]) -> int:
    """Take a GPU for the rest of this process's life; wait while other processes hold all of them.

    Asked again, it gives the same one.

    A lock on a file in the system's temporary folder says that a GPU is taken. The system gives it
    up when the process ends in whatever way, so that a killed job blocks nobody.

    Args:
        names: What tells the GPUs of this machine apart for every process, such as UUIDs.

    Returns:
        Position in ``names``.
    """
    import fcntl  # Only here: Windows has none, and needs none without a GPU.

    folder = Path(tempfile.gettempdir())
    waiting = False
    while True:
        for position, name in enumerate(names):
            lock = folder / f"trak-{os.getuid()}-gpu-{name}.lock"
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return position  # The descriptor stays open, and the lock with it.
        if not waiting:
            print(f"Waiting: other jobs hold all GPUs ({len(names)}).", flush=True)
            waiting = True
        time.sleep(_LOOK_SECONDS)

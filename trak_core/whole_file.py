"""A file under its final name is whole: written beside it, on the disk, then renamed.

Standard library only: the Snakefile uses it too.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Generator[Path, None, None]:
    """Give a place to write to; what stands there at the end appears under ``path`` at once.

    Args:
        path: Final name; its folder is made. On an exception it stays as it was.

    Yields:
        A hidden name beside ``path`` that no other process uses. A killed process leaves it behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        yield partial
        # Else a power cut could leave the new name on an empty file.
        descriptor = os.open(partial, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

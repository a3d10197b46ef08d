"""Files held open for reading, few at a time: one job may read thousands.

An open HDF5 file takes 0.8 MB, and a process may have 1,024 files open on most systems.
"""

import contextlib
from pathlib import Path

import h5py

_AT_ONCE = 64


def _signature(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Held:
    """A file that is open when it is asked for; the least recently used ones are closed."""

    _open: dict["Held", h5py.File] = {}  # by last use  # ruff: ignore[mutable-class-default]

    def __init__(self, path: Path) -> None:
        """Remember which file lies at a path.

        Raises:
            OSError: If there is none.
        """
        self.path, self._seen = path, _signature(path)

    def file(self) -> h5py.File:
        """Return the open file, valid until another is asked for.

        Raises:
            OSError: If it is not HDF5, or not the file that lay there first.
        """
        file = self._open.pop(self, None)
        if file is None:
            while len(self._open) >= _AT_ONCE:
                self._open.pop(next(iter(self._open))).close()
            # Blocks are read once: a cache a file would add up over the checkpoints.
            file = h5py.File(self.path, "r", rdcc_nbytes=0)
            if _signature(self.path) != self._seen:
                file.close()
                raise OSError("it was replaced or changed while it was read")
        self._open[self] = file
        return file

    def close(self) -> None:
        """Close the file, if it is open."""
        with contextlib.suppress(KeyError):
            self._open.pop(self).close()

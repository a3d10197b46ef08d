"""A file's seal: a hash of all of its bytes, at its end, where HDF5 doesn't look.

The content hash covers what h5py reads; the seal covers every byte, and is compared before any HDF5
library sees them: a damaged file can make those crash or run for ever.
"""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

_MARK = b"trak-seal blake2b "
_DIGEST_BYTES = 16
_SEAL_BYTES = len(_MARK) + 2 * _DIGEST_BYTES
_BLOCK_BYTES = 2**22


def _digest(file: BinaryIO, n_bytes: int) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    while n_bytes:
        block = file.read(min(_BLOCK_BYTES, n_bytes))
        if not block:
            raise OSError("the file became shorter while it was read")
        digest.update(block)
        n_bytes -= len(block)
    return digest.hexdigest().encode()


def seal(path: Path) -> None:
    """Put the hash of a complete file at its end."""
    with path.open("r+b") as file:
        found = _digest(file, path.stat().st_size)
        file.write(_MARK + found)


def seal_holds(path: Path) -> bool | None:
    """Return whether a file's bytes are those that were sealed.

    Returns:
        None for a file without a seal: made before there were seals, changed by an HDF5 library,
        which cuts the seal off, or cut short.
    """
    with path.open("rb") as file:
        n_bytes = file.seek(0, os.SEEK_END) - _SEAL_BYTES
        if n_bytes < 0:
            return None
        file.seek(n_bytes)
        mark, stored = file.read(len(_MARK)), file.read()
        if mark != _MARK:
            return None
        file.seek(0)
        return _digest(file, n_bytes) == stored

"""Seal a file with a checksum for each block, and read it by verified blocks only.

HDF5 gets a sealed file's bytes from here, block by block, each compared with its hash first:
damage can make HDF5 libraries crash or run for ever. So a reader reads what it needs, once, and a
writer's blocks are hashed as they pass. Hashes are in memory while a file is open: 16 bytes a block
of a file that is read, and some 130 of one that is written, 1 MB for each GB. After a file's ``n``
bytes come 16 bytes a block, and then

    trak-seal blake2b by blocks of 131072: <n, 16 hexadecimal digits> <hash of all hashes and n, 32>

Files of before end with ``trak-seal blake2b `` and one hash of all bytes, 32 hexadecimal digits.
"""

import abc
import hashlib
import io
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from trak_core.system.job import called_back

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_BYTES = 2**17
_DIGEST_BYTES = 16
_MARK = b"trak-seal blake2b by blocks of %d: " % BLOCK_BYTES
SEAL_BYTES = len(_MARK) + 16 + 1 + 2 * _DIGEST_BYTES
_WHOLE_MARK = b"trak-seal blake2b "
_WHOLE_BYTES = len(_WHOLE_MARK) + 2 * _DIGEST_BYTES
# Neighbouring chunks share a block, and metadata lie between them.
_CACHED_BLOCKS = 4
# A file that is written has so many blocks at a time of which only the beginning was written.
_MOST_BEGUN = 64


class Damaged(OSError):
    """Bytes of a file are not those that were sealed."""


def _hash(data: "Buffer") -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _signed(hashes: bytes, n_bytes: int) -> bytes:
    about = b"%016x" % n_bytes
    return about + b" " + _hash(hashes + about).hex().encode()


class _BlockFile(io.RawIOBase):
    """The bytes of a file as h5py reads them, which are read in whole blocks."""

    def __init__(self, file: io.FileIO, n_bytes: int) -> None:
        self._file, self.n_bytes, self._place = file, n_bytes, 0
        self._cache: OrderedDict[int, bytes] = OrderedDict()

    @abc.abstractmethod
    def _seen(self, block: int, data: "Buffer") -> None:
        """Take notice of a block's bytes before they are handed on."""

    @called_back
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the place of the next read or write."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.n_bytes}[whence]
        self._place = start + offset
        return self._place

    @called_back
    def tell(self) -> int:
        """Return the place of the next read or write."""
        return self._place

    def readable(self) -> bool:
        """Say that it is."""
        return True

    def seekable(self) -> bool:
        """Say that it is."""
        return True

    def _fill(self, start: int, part: memoryview) -> None:
        self._file.seek(start)
        while part:
            count = self._file.readinto(part)
            if not count:
                raise Damaged("the file became shorter while it was read")
            part = part[count:]

    def _block(self, block: int) -> bytes:
        """Return a block of which a part is asked for, and keep it for the rest."""
        data = self._cache.pop(block, None)
        if data is None:
            start = block * BLOCK_BYTES
            read = bytearray(min(BLOCK_BYTES, self.n_bytes - start))
            self._fill(start, memoryview(read))
            data = bytes(read)
            self._seen(block, data)
            while len(self._cache) >= _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        self._cache[block] = data
        return data

    @called_back
    def readinto(self, buffer: "Buffer", /) -> int:
        """Read from the present place on."""
        view = memoryview(buffer).cast("B")
        start, stop = self._place, min(self._place + len(view), self.n_bytes)
        # Blocks that lie in the buffer as a whole go there at once.
        first, end = -(-start // BLOCK_BYTES), stop // BLOCK_BYTES
        if first < end:
            inner = view[first * BLOCK_BYTES - start : end * BLOCK_BYTES - start]
            self._fill(first * BLOCK_BYTES, inner)
            for block in range(first, end):
                place = (block - first) * BLOCK_BYTES
                self._seen(block, inner[place : place + BLOCK_BYTES])
        else:
            end = first
        edges = {start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES} - set(range(first, end))
        for block in sorted(edges) if start < stop else ():
            lowest = block * BLOCK_BYTES
            low, high = max(start, lowest), min(stop, lowest + BLOCK_BYTES)
            view[low - start : high - start] = self._block(block)[low - lowest : high - lowest]
        self._place = max(start, stop)
        return self._place - start

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


class SealedFile(_BlockFile):
    """A sealed file's bytes, none of which is handed on before its block was compared.

    ``damage`` says what was found, for good: HDF5 may take a failed read for an answer. It is no
    exception, whose traceback would hold HDF5's file, which holds this one, till Python ends.
    """

    def __init__(self, path: Path, hashes: bytes, n_bytes: int) -> None:
        """Open a file whose blocks have these hashes."""
        super().__init__(path.open("rb", buffering=0), n_bytes)
        self._hashes = hashes
        self.damage: str | None = None

    def _seen(self, block: int, data: "Buffer") -> None:
        place = block * _DIGEST_BYTES
        if _hash(data) != self._hashes[place : place + _DIGEST_BYTES]:
            raise Damaged("a block of the file has another hash")

    @called_back
    def readinto(self, buffer: "Buffer", /) -> int:
        """Read from the present place on; a ``Damaged`` if these are not the sealed bytes."""
        try:
            return super().readinto(buffer)
        except Damaged as error:
            self.damage = str(error)
            raise

    def read_all(self) -> None:
        """Compare every block."""
        self.seek(0)
        data = bytearray(2**5 * BLOCK_BYTES)
        while self.readinto(data):
            pass


class SealingFile(_BlockFile):
    """A new file's bytes, hashed while they are written.

    ``failure`` is what the system said of a write, after which nothing more is written: HDF5 can
    close its file, and who writes it must ask.
    """

    def __init__(self, path: Path, mode: str) -> None:
        """Open a file as ``open`` does: ``w+`` for a new one, ``r+`` for one to be changed."""
        file = io.FileIO(path, mode)
        super().__init__(file, file.seek(0, os.SEEK_END))
        self.failure: OSError | None = None
        self._hashes: dict[int, bytes] = {}
        # Blocks whose beginning was written: its hash so far, and its length.
        self._begun: OrderedDict[int, tuple[hashlib.blake2b, int]] = OrderedDict()

    def _seen(self, block: int, data: "Buffer") -> None:
        self._hashes[block] = _hash(data)

    def writable(self) -> bool:
        """Say that it is."""
        return True

    @called_back
    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> None:
        """Close the file; HDF5, which may be stopped before it has, can still end its own."""
        self.failure = self.failure or OSError("the file is closed")
        super().close()

    @called_back
    def write(self, buffer: "Buffer", /) -> int:
        """Write at the present place."""
        view = memoryview(buffer).cast("B")
        start, unwritten = self._place, view
        if start > self.n_bytes:
            # Zeros come between: of the last block only the beginning is known.
            self._forget(self.n_bytes // BLOCK_BYTES)
        try:
            if self.failure is None:
                self._file.seek(start)
            while unwritten and self.failure is None:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            self.failure = error
        self._place = start + len(view)
        self.n_bytes = max(self.n_bytes, self._place)
        for block in range(start // BLOCK_BYTES, -(-self._place // BLOCK_BYTES)):
            lowest = block * BLOCK_BYTES
            low, high = max(start, lowest), min(self._place, lowest + BLOCK_BYTES)
            self._written(block, low - lowest, view[low - start : high - start])
        return len(view)

    def _written(self, block: int, place: int, part: memoryview) -> None:
        """Go on with a block's hash, or forget it: ``finish`` reads the block then."""
        self._cache.pop(block, None)
        self._hashes.pop(block, None)
        so_far, length = self._begun.pop(block, (None, 0))
        if place == 0:
            so_far, length = hashlib.blake2b(part, digest_size=_DIGEST_BYTES), len(part)
        elif so_far is not None and place == length:
            so_far.update(part)
            length += len(part)
        else:
            return
        if length == BLOCK_BYTES:
            self._hashes[block] = so_far.digest()
            return
        self._begun[block] = so_far, length
        if len(self._begun) > _MOST_BEGUN:
            self._begun.popitem(last=False)

    def _forget(self, first: int) -> None:
        """Forget what is known of a block, and of those after it."""
        for known in (self._hashes, self._begun, self._cache):
            for block in [block for block in known if block >= first]:
                del known[block]

    @called_back
    def truncate(self, size: int | None = None, /) -> int:
        """Cut the file, or make it longer by zeros."""
        size = self._place if size is None else size
        if size != self.n_bytes and self.failure is None:
            self._forget(min(size, self.n_bytes) // BLOCK_BYTES)
            self._file.truncate(size)
            self.n_bytes = size
        return size

    def finish(self) -> None:
        """Put the seal at the end of the complete file."""
        if self.failure is not None:
            raise self.failure
        n_blocks = -(-self.n_bytes // BLOCK_BYTES)
        last_bytes = self.n_bytes - (n_blocks - 1) * BLOCK_BYTES
        so_far, length = self._begun.pop(n_blocks - 1, (None, 0))
        if so_far is not None and length == last_bytes:
            self._hashes[n_blocks - 1] = so_far.digest()
        self._begun.clear()
        for block in range(n_blocks):
            if block not in self._hashes:
                self._block(block)
        hashes = b"".join(self._hashes[block] for block in range(n_blocks))
        self._file.seek(self.n_bytes)
        unwritten = memoryview(hashes + _MARK + _signed(hashes, self.n_bytes))
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]


def read_seal(path: Path) -> tuple[bytes, int] | None:
    """Return the hashes of a file's blocks and its bytes before them; None for one without a seal.

    Hashes are none of a file with one hash of all bytes, which is compared here. A ``Damaged`` says
    that hashes differ.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - SEAL_BYTES))
        end = file.read()
        if not end.startswith(_MARK):
            return _read_whole_seal(file, size)
        try:
            n_bytes = int(end[len(_MARK) : len(_MARK) + 16], 16)
        except ValueError:
            n_bytes = -1
        hashes_bytes = _DIGEST_BYTES * -(-n_bytes // BLOCK_BYTES)
        if n_bytes < 0 or n_bytes + hashes_bytes + SEAL_BYTES != size:
            raise Damaged("the hash at the end differs")
        file.seek(n_bytes)
        hashes = file.read(hashes_bytes)
    if end[len(_MARK) :] != _signed(hashes, n_bytes):
        raise Damaged("the hash at the end differs")
    return hashes, n_bytes


def _read_whole_seal(file: io.BufferedReader, size: int) -> tuple[bytes, int] | None:
    n_bytes = size - _WHOLE_BYTES
    file.seek(max(0, n_bytes))
    end = file.read()
    if n_bytes < 0 or not end.startswith(_WHOLE_MARK):
        return None
    digest, n_left = hashlib.blake2b(digest_size=_DIGEST_BYTES), n_bytes
    file.seek(0)
    while n_left and (block := file.read(min(2**22, n_left))):
        digest.update(block)
        n_left -= len(block)
    if digest.hexdigest().encode() != end[len(_WHOLE_MARK) :]:
        raise Damaged("the hash at the end differs")
    return b"", n_bytes

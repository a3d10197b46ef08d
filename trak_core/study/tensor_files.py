"""Load a file of tensors safely, digest it on the way, and explain why one is unreadable.

PyTorch files are read with ``weights_only=True``, the rest is safetensors.
"""

import io
import os
import re
import zipfile
import zlib
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

import torch
from safetensors.torch import load_file

from trak_core.errors import InputError
from trak_core.system.job import came_from_no_memory

# How files of torch.save begin: since 1.6 as a zip file, before as a pickle.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_ZIP_HEADER_BYTES = 30  # before each part; the lengths of a name and of extras end it
_FOLDER = 0x10  # among a zip entry's attributes
_BLOCK_BYTES = 2**22
# torch looks for the list of parts at a zip file's end first. A longer step than this is a look
# ahead, and its bytes are digested in their turn.
_STEP_BYTES = 2**20
_AGAIN = "Copy it again."
# What torch and safetensors say of a file that ends too early.
_CUT = re.compile(r"unexpected EOF|invalid header length|incomplete metadata")


class Digest(Protocol):
    """A hash of hashlib's."""

    def update(self, data: Any, /) -> None: ...


class _UnreadableError(Exception):
    """Says in sentences what is wrong with a file, and what to do."""


@dataclass(slots=True)
class _Part:
    """One part of a zip file: where its bytes lie, and their checksum."""

    name: str
    start: int
    stop: int
    checksum: int
    so_far: int = 0


def _zip_parts(file: BinaryIO) -> list[_Part]:
    """Return a PyTorch file's parts in the order in which they lie; none of their bytes is read.

    A file whose parts would be larger than itself is not unpacked. torch would return memory that
    nothing was read into for a part that is marked as a folder.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        size = os.fstat(file.fileno()).st_size
        if sum(entry.file_size for entry in entries) > size:
            raise _UnreadableError(
                "its parts are larger than the file: torch.save never compresses. Save it by "
                "torch.save."
            )
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _UnreadableError(
                "its parts are compressed: torch.save never does that. Save it by torch.save."
            )
        if any(entry.external_attr & _FOLDER or entry.is_dir() for entry in entries):
            raise _UnreadableError(f"a part is a folder: the file is damaged. {_AGAIN}")
        parts = []
        for entry in entries:
            header = os.pread(file.fileno(), _ZIP_HEADER_BYTES, entry.header_offset)
            if len(header) < _ZIP_HEADER_BYTES or not header.startswith(_ZIP):
                raise zipfile.BadZipFile(f"{entry.filename} is not where it says")
            lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:], "little")
            start = entry.header_offset + _ZIP_HEADER_BYTES + sum(lengths)
            parts.append(_Part(entry.filename, start, start + entry.file_size, entry.CRC))
    except zipfile.BadZipFile as error:
        # Python's one complaint of a file that doesn't end as zip files do; others are of its list.
        if str(error) == "File is not a zip file":
            raise _UnreadableError(
                f"it begins as a zip file and doesn't end as one: it was cut off. {_AGAIN}"
            ) from error
        raise _UnreadableError(f"the list of its parts is damaged: {error}. {_AGAIN}") from error
    return sorted(parts, key=lambda part: part.start)


class _DigestedFile(io.RawIOBase):
    """A file whose bytes are digested, in order, as torch reads them into its tensors.

    ``torch.load`` takes tensors in the order in which ``torch.save`` wrote them, so that each byte
    is read once and nothing is held but the tensors. torch itself doesn't look at the checksums
    in a zip file.
    """

    def __init__(self, file: BinaryIO, digest: Digest, parts: list[_Part]) -> None:
        self._file, self._digest = file, digest
        self._parts = deque(parts)
        self._damaged: list[str] = []
        self._end = 0  # the bytes before it are digested

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any, /) -> int:
        start = self._file.tell()
        if self._end < start <= self._end + _STEP_BYTES:
            self._read_up_to(start)
        view = memoryview(buffer).cast("B")
        n_bytes = self._file.readinto(view)  # pyright: ignore[reportAttributeAccessIssue]
        if start <= self._end < start + n_bytes:
            self._take(view[self._end - start : n_bytes])
        return n_bytes

    def finish(self) -> None:
        """Digest what nobody has read, and compare checksums.

        Raises:
            _UnreadableError: If a part is damaged.
        """
        self._read_up_to(os.fstat(self._file.fileno()).st_size)
        damaged = [*self._damaged, *(part.name for part in self._parts)]
        if damaged:
            raise _UnreadableError(
                f"the checksum of its part {damaged[0]} differs: the file is damaged, or was saved "
                "after torch.serialization.set_crc32_options(False). Copy it again, or save it "
                "with checksums."
            )

    def _read_up_to(self, stop: int) -> None:
        self._file.seek(self._end)
        while block := self._file.read(min(_BLOCK_BYTES, stop - self._end)):
            self._take(memoryview(block))
        self._file.seek(stop)

    def _take(self, block: memoryview) -> None:
        start, self._end = self._end, self._end + len(block)
        self._digest.update(block)
        while self._parts and self._parts[0].start <= self._end:
            part = self._parts[0]
            inside = block[max(part.start - start, 0) : max(part.stop - start, 0)]
            part.so_far = zlib.crc32(inside, part.so_far)
            if part.stop > self._end:
                break
            if part.so_far != part.checksum:
                self._damaged.append(part.name)
            self._parts.popleft()


def _unknown(start: bytes, remedy: str) -> str:
    """Return what a file is that begins as no file of tensors does."""
    if not start.strip(b"\0"):
        return f"it {'begins with zeros alone' if start else 'is empty'}. {_AGAIN}"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS. Fetch the file itself by `git lfs pull`."
    return f"it begins with {start}, as neither torch.save's files nor safetensors do. {remedy}"


def _reason(error: Exception, remedy: str) -> str:
    """Return what a reader of tensors complains of, without the advice of torch, and what to do."""
    if isinstance(error, _UnreadableError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}. Give a file that may be read."
    text = str(error)
    if isinstance(error, EOFError | LookupError) or _CUT.search(text):
        return f"it was cut off, or is damaged. {_AGAIN}"
    other = re.search(r"(?:global:|unsupported) GLOBAL (\S+)", text)
    if other and other[1].startswith("numpy"):
        return (
            f"it holds numbers or arrays of numpy ({other[1].rstrip('.')}). Save tensors and "
            "Python's numbers in their place: `torch.from_numpy(array)`, `number.item()`."
        )
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else (text.splitlines() or [type(error).__name__])[0]
    if first.startswith("Unsupported operand"):
        return (
            "its pickle is none of torch.save's own protocol; `pickle.dump` writes such files, of "
            "numpy's numbers for one. Save tensors by torch.save: `torch.save({name: "
            "torch.as_tensor(value), ...}, path)`."
        )
    found = f"it holds {other[1]}" if other else re.split(r" In PyTorch 2|\(Could this", first)[0]
    return f"{found.rstrip('. ')}. {remedy}"


@contextmanager
def _explained(path: Path, must: str, remedy: str) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        if came_from_no_memory(error):
            raise
        # What a broken file makes of its reader is open-ended: any error is the file's.
        raise InputError(
            f"{path}: {must}; pickled objects other than tensors are never loaded. Reading it "
            f"failed: {_reason(error, remedy)}"
        ) from error


def _is_safetensors(start: bytes) -> bool:
    return start[7:9] == b"\0{"  # eight bytes of a length, then JSON


def _is_zip(start: bytes, remedy: str) -> bool:
    """Return whether a file is a zip file of PyTorch's, False for an old one."""
    if not start.startswith((_ZIP, _PICKLE)):
        raise _UnreadableError(_unknown(start, remedy))
    return start.startswith(_ZIP)


def digest_file(path: Path, digest: Digest) -> None:
    """Digest the bytes of a file."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)


def read_tensors(path: Path, must: str, remedy: str, digest: Digest) -> Any:
    """Read a file of tensors, and of nothing that would run code, on the CPU.

    A file of ``torch.save`` is read once, and never held beside its tensors. The tensors of
    safetensors are a map of the file.

    Args:
        path: Written by ``torch.save`` or safetensors; its first bytes tell which, not its name.
        must: What it must be, for the message.
        remedy: What to do if it is whole and holds something else, likewise.
        digest: Gets the file's bytes, in order.

    Returns:
        What was saved.

    Raises:
        InputError: If it cannot be read.
    """
    with _explained(path, must, remedy), path.open("rb") as file:
        start = file.read(32)
        if _is_safetensors(start):
            saved = load_file(path)
            digest_file(path, digest)
            return saved
        digested = _DigestedFile(file, digest, _zip_parts(file) if _is_zip(start, remedy) else [])
        digested.seek(0)
        try:
            # A file, not its path, because torch looks at a path's ending.
            saved = torch.load(cast(IO[bytes], digested), map_location="cpu", weights_only=True)
        except Exception:
            digested.finish()  # that it is damaged says more than what torch makes of it
            raise
        digested.finish()
        return saved


def read_shapes(path: Path, must: str, remedy: str) -> Any:
    """Read a file of tensors without their numbers: cheap, however large it is.

    Args:
        path: See ``read_tensors``, as for the rest.
        must: What it must be.
        remedy: What to do.

    Returns:
        What was saved, with tensors that have a shape and a dtype and no numbers to be read. None
        for a file of torch before 1.6, which can only be read whole.

    Raises:
        InputError: If it cannot be read; checksums are not compared.
    """
    with _explained(path, must, remedy), path.open("rb") as file:
        start = file.read(32)
        if _is_safetensors(start):
            return load_file(path)  # mapped, and not touched
        if not _is_zip(start, remedy):
            return None
        _zip_parts(file)
        file.seek(0)
        return torch.load(file, map_location="meta", weights_only=True)

"""Tell a checkpoint that was replaced, also where the other file has its size and time.

`cp -p`, `rsync -t`, `tar` and git-lfs may leave such a file. Where the file system says that a file
was changed, parts of it are read: its ends, the list of checksums of a ``torch.save``, a part of
each tensor of safetensors. Standard library only, because every start of Snakemake imports this.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from trak_core.dependency_digests import stat_signature
from trak_core.system.files import CLOCK_NS, read_record, write_record

CHECKPOINTS_RECORD = "checkpoints.json"
_WHOLE_BYTES = 2**20  # a smaller file is read whole
_END_BYTES = 2**16
_N_PARTS, _PART_BYTES = 64, 2**12
_TENSOR_BYTES = 2**9  # of each tensor: training changes nearly all of its numbers
# A header of safetensors, or the list of a zip file's parts, that is larger isn't read.
_MOST_LIST_BYTES = 2**24
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_ZIP64_END = b"PK\x06\x06"
_SECOND_NS = 10**9
# Which parts are read, above: raise it with any other choice, or each checkpoint that is read again
# would count as replaced.
_CHOICE = 1


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _zip_list(end: bytes) -> tuple[int, int] | None:
    """Return where the list of a zip file's parts lies, with their checksums, and its length."""
    place = end.rfind(_ZIP64_END)
    if place >= 0 and len(end) >= place + 56:
        length, start = (int.from_bytes(end[place + i : place + i + 8], "little") for i in (40, 48))
        return start, length
    place = end.rfind(_ZIP_END)
    if place < 0 or len(end) < place + 20:
        return None
    length, start = (int.from_bytes(end[place + i : place + i + 4], "little") for i in (12, 16))
    return start, length


def _tensor_parts(file: BinaryIO, start: bytes) -> Iterator[tuple[int, int]]:
    """Yield the middle of each tensor of a file of safetensors; nothing for any other file."""
    length = int.from_bytes(start[:8], "little")
    if start[8:9] != b"{" or length > _MOST_LIST_BYTES:
        return
    try:
        tensors = json.loads(os.pread(file.fileno(), length, 8))
        spans = [t["data_offsets"] for name, t in tensors.items() if name != "__metadata__"]
        for first, last in spans:
            n_bytes = min(last - first, _TENSOR_BYTES)
            yield 8 + length + first + (last - first - n_bytes) // 2, n_bytes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return


def _parts(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Yield places and lengths of the parts of a file that are read."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    start, end = (os.pread(file.fileno(), _END_BYTES, at) for at in (0, size - _END_BYTES))
    yield 0, _END_BYTES
    yield size - _END_BYTES, _END_BYTES
    for i in range(_N_PARTS):
        yield i * (size - _PART_BYTES) // _N_PARTS, _PART_BYTES
    if not start.startswith(_ZIP):
        yield from _tensor_parts(file, start)
        return
    checksums = _zip_list(end)
    if checksums is not None and checksums[1] <= _MOST_LIST_BYTES:
        yield checksums


def parts_digest(path: Path) -> str:
    """Hash parts of a file, or of each file of a folder.

    A file up to 1 MiB counts whole. Any other one counts by its first and last 64 KiB and by 64
    parts of 4 KiB between them. A ``torch.save`` counts by all its checksums too, so that every
    change does; a file of safetensors by 512 bytes of each tensor.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file_path in _files(path):
        with file_path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{file_path.relative_to(path)} {size}\n".encode())
            for start, length in _parts(file, size):
                # A damaged list may name places that aren't there.
                if 0 <= start < size and length > 0:
                    digest.update(os.pread(file.fileno(), length, start))
    return digest.hexdigest()


def _change(path: Path) -> str | None:
    """Return what differs once a file was changed or replaced, whatever its time was set to.

    None where the file system doesn't tell: it knows whole seconds alone, or the change is so
    recent that another one could have the same time.
    """
    stats, now = [file.stat() for file in _files(path)], time.time_ns()
    times = [stat.st_ctime_ns for stat in stats]
    if not times or all(t % _SECOND_NS == 0 for t in times) or max(times) >= now - CLOCK_NS:
        return None
    text = " ".join(f"{stat.st_ino} {stat.st_ctime_ns}" for stat in stats)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class CheckpointSignatures:
    """Signatures of checkpoints, from a record of what a results folder saw of them before.

    A checkpoint's signature is its ``stat_signature``, as long as ``parts_digest`` is what it was
    when that size and time were first seen; else both. Parts are read only at first, and where the
    file system says that a file was changed since. A record of another choice of parts counts as
    none: what is there is seen for the first time.
    """

    def __init__(self, record: Path) -> None:
        self._record = record
        known = read_record(record)
        self._known = known.get("seen", {}) if known.get("choice") == _CHOICE else {}
        # By path, and by size and time: what was read first, the last change, what was read then.
        self._seen: dict[str, dict[str, list[str | None]]] = {
            path: dict(seen) for path, seen in self._known.items()
        }

    def of(self, path: Path) -> str:
        """Return the signature of a file or folder: 16 hexadecimal digits, or 49."""
        plain, change = stat_signature(path), _change(path)
        seen = self._seen.setdefault(path.as_posix(), {})
        first, last_change, last = seen.get(plain, (None, None, None))
        if last is None or change is None or change != last_change:
            try:
                last = parts_digest(path)
            except OSError:
                return plain  # one that can't be read is refused by who needs it
        first = last if first is None else first
        seen[plain] = [first, change, last]
        return plain if last == first else f"{plain} {last}"

    def write(self) -> None:
        """Bring the record up to date."""
        if self._seen != self._known:
            known = {"choice": _CHOICE, "seen": self._seen}
            write_record(self._record, known, must=False)


@cache
def checkpoint_signatures(results: Path) -> CheckpointSignatures:
    """Return the signatures that go by a results folder's record, once for a process."""
    return CheckpointSignatures(results / CHECKPOINTS_RECORD)

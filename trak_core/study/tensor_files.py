"""A file of tensors, read without running code; or in a sentence why it can't be read.

PyTorch files are read with ``weights_only=True``, the rest is safetensors.
"""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trak_core.errors import InputError
from trak_core.system.job import came_from_no_memory

# How files of torch.save begin: since 1.6 as a zip file, before as a pickle.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_FOLDER = 0x10  # among a zip entry's attributes
_AGAIN = "Copy it again."
# What torch and safetensors say of a file that ends too early.
_CUT = re.compile(r"unexpected EOF|invalid header length|incomplete metadata")


class _UnreadableError(Exception):
    """Says in sentences what is wrong with a file, and what to do."""


def _check_zip(path: Path) -> None:
    """Compare the checksums in PyTorch's zip files, which torch itself doesn't look at.

    A file whose parts would be larger than itself is not unpacked. Of a part that is marked as a
    folder, torch would return memory that nothing was read into.
    """
    try:
        with zipfile.ZipFile(path) as file:
            parts = file.infolist()
            if sum(part.file_size for part in parts) > path.stat().st_size:
                raise _UnreadableError(
                    "its parts are larger than the file: torch.save never compresses. Save it by "
                    "torch.save."
                )
            if any(part.external_attr & _FOLDER or part.is_dir() for part in parts):
                raise _UnreadableError(f"a part is a folder: the file is damaged. {_AGAIN}")
            damaged = file.testzip()
    except zipfile.BadZipFile as error:
        # Python's one complaint of a file that doesn't end as zip files do; others are of its list.
        if str(error) == "File is not a zip file":
            raise _UnreadableError(
                f"it begins as a zip file and doesn't end as one: it was cut off. {_AGAIN}"
            ) from error
        raise _UnreadableError(f"the list of its parts is damaged: {error}. {_AGAIN}") from error
    if damaged:
        raise _UnreadableError(
            f"the checksum of its part {damaged} differs: the file is damaged, or was saved after "
            "torch.serialization.set_crc32_options(False). Copy it again, or save it with checksums."
        )


def _unknown(start: bytes, remedy: str) -> str:
    """Return what a file is that begins as none of tensors does."""
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
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else (text.splitlines() or [type(error).__name__])[0]
    found = f"it holds {other[1]}" if other else re.split(r" In PyTorch 2|\(Could this", first)[0]
    return f"{found.rstrip('. ')}. {remedy}"


def unpickled(path: Path, must: str, remedy: str) -> Any:
    """Read a file of tensors, and of nothing that would run code, on the CPU.

    Args:
        path: Written by ``torch.save`` or safetensors; its first bytes tell which, not its name.
        must: What it must be, for the message.
        remedy: What to do if it is whole and holds something else, likewise.

    Returns:
        What was saved.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(32)
            if start[7:9] == b"\0{":  # safetensors: eight bytes of a length, then JSON
                return load_file(path)
            if start.startswith(_ZIP):
                _check_zip(path)
            elif not start.startswith(_PICKLE):
                raise _UnreadableError(_unknown(start, remedy))
            file.seek(0)
            # A file, not its path: of a path torch looks at the ending.
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if came_from_no_memory(error):
            raise
        # What a broken file makes of its reader is open-ended: any error is the file's.
        raise InputError(
            f"{path}: {must}; pickled objects other than tensors are never loaded. Reading it "
            f"failed: {_reason(error, remedy)}"
        ) from error

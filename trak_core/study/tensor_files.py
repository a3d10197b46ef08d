"""A file of tensors, read without running code.

PyTorch files are read with ``weights_only=True``, the rest is safetensors.
"""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trak_core.errors import InputError

_FOLDER = 0x10  # among a zip entry's attributes


def _check_zip(path: Path) -> None:
    """Compare the checksums in PyTorch's zip files, which torch itself doesn't look at.

    A file whose parts would be larger than itself is not unpacked. Of a part that is marked as a
    folder, torch would return memory that nothing was read into.
    """
    with path.open("rb") as start:
        if start.read(4) != b"PK\x03\x04":
            return
    with zipfile.ZipFile(path) as file:
        parts = file.infolist()
        if sum(part.file_size for part in parts) > path.stat().st_size:
            raise ValueError("its parts are larger than the file: torch.save never compresses.")
        if any(part.external_attr & _FOLDER or part.is_dir() for part in parts):
            raise ValueError("a part is a folder: the file is damaged.")
        damaged = file.testzip()
    if damaged:
        raise ValueError(
            f"the checksum of its part {damaged} differs: the file is damaged, or was saved after "
            "torch.serialization.set_crc32_options(False)."
        )


def _reason(error: Exception, path: Path) -> str:
    """Return in a sentence what a reader of tensors complains of, without the advice of torch."""
    with path.open("rb") as file:
        start = file.read(40)
    if start and start.isascii() and start.decode().splitlines()[0].isprintable():
        # A pointer of Git LFS, a page of a website.
        return f"it is a text that begins with {start.decode()!r}."
    other = re.search(r"(?:global:|unsupported) GLOBAL (\S+)", str(error))
    if other:
        return f"it holds {other[1]}."
    if isinstance(error, zipfile.BadZipFile):
        return "it begins as a zip file does, and has no end: it was cut off."
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", str(error))
    first = unpickler[1] if unpickler else (str(error).splitlines() or ["it ends too early"])[0]
    return f"{first.rstrip('. ')}."


def unpickled(path: Path, must: str, remedy: str = "") -> Any:
    """Read a file of tensors, and of nothing that would run code, on the CPU.

    Args:
        path: Written by ``torch.save``, or ``.safetensors``.
        must: What it must be, for the message.
        remedy: What to do, likewise.

    Returns:
        What was saved.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _check_zip(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # What a broken file makes of its reader is open-ended: any error is the file's.
        raise InputError(
            f"{path}: {must}; pickled objects other than tensors are never loaded. Reading it "
            f"failed: {_reason(error, path)}{remedy}"
        ) from error

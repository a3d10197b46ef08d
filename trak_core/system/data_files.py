"""The data files that a config names, by their content; standard library only."""

import glob
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trak_core.errors import InputError
from trak_core.system.record import read_record, write_record

# Clocks of file systems stand still for up to two seconds: a file changed that lately may change
# once more under the same time.
_CLOCK_NS = 2 * 10**9


def _files(pattern: str) -> Iterator[Path]:
    # A path may hold the signs of a pattern. Path.glob means other files by `**`, from version to
    # version of Python.
    found = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # ruff: ignore[glob]
    for path in map(Path, found):
        if path.is_file():
            yield path
        # What Python and others leave in a folder of data comes and goes by itself.
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def _plain(path: Path) -> Path:
    # To ask the disk where links lead takes long for thousands of files.
    return Path(os.path.abspath(path))  # ruff: ignore[os-path-abspath]


def _checked_files(pattern: str, results: Path) -> list[Path]:
    # The run's own results change while it runs.
    folder = _plain(results)
    files = [file for file in _files(pattern) if not _plain(file).is_relative_to(folder)]
    if not files:
        raise InputError(
            "data_files: each entry must name a file, a folder with files in it, or be a pattern "
            "of such, beside the results and hidden ones, which don't count. Found nothing at "
            f"{pattern!r} (from {Path.cwd()})."
        )
    return files


def file_digest(path: Path) -> str:
    """Give the hash of a file's bytes, 32 hexadecimal digits.

    Returns:
        The digits.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise InputError(
            f"{path}: a data file must be readable. Found: {error.strerror or error}."
        ) from error


def data_digests(patterns: Sequence[str], record: Path) -> dict[str, str]:
    """Hash the files that a config names under ``data_files``.

    Every job starts the Snakefile: a file with the size and times that the record has of it is not
    read again. What the digests are does not depend on the record.

    Args:
        patterns: Paths of files, or of folders for all files below them, or patterns as in a shell,
            where ``**`` stands for any folders; relative to the working folder. Hidden files of a
            folder, and the run's own results, don't count.
        record: Where digests are kept, in the results folder. Written anew if it changes.

    Returns:
        32 hexadecimal digits of each file, by its path, in order.

    Raises:
        InputError: If an entry names no file, or one that cannot be read.
    """
    if not patterns:
        return {}
    known, kept, digests = read_record(record), {}, {}
    files = {file for pattern in patterns for file in _checked_files(pattern, record.parent)}
    for file in sorted(files):
        now, stat, name = time.time_ns(), file.stat(), file.as_posix()
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        *before, digest = known.get(name, [None])
        digests[name] = digest if before == seen and digest else file_digest(file)
        if stat.st_ctime_ns < now - _CLOCK_NS:
            kept[name] = [*seen, digests[name]]
    if kept != known:
        write_record(record, kept)
    return digests

"""Write files whole, lock the results folder, and keep digests of code and data between starts.

Standard library only, because every start of Snakemake imports this.
"""

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trak_core.dependency_digests import content_digest
from trak_core.errors import InputError, no_room

if TYPE_CHECKING:
    import pandas as pd

# What a disk says that knows no locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
# The name of the record, in a results folder, of the config of its last start.
CONFIG_RECORD = "config.json"
# A spreadsheet runs a cell that begins with one of these; the wide ones are those of East Asia.
_RUN = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _delete_leftovers(path: Path, prefix: str) -> None:
    """Delete what killed processes of this machine left of a file."""
    if os.name != "posix":
        return  # elsewhere os.kill(process, 0) does not only ask
    for partial in path.parent.iterdir():
        process = partial.name.removeprefix(prefix).removesuffix(".part")
        is_ours = process.isdigit() and partial.name == f"{prefix}{process}.part"
        if is_ours and not _is_running(int(process)):
            partial.unlink(missing_ok=True)


def hold_results(results: Path) -> None:
    """Refuse a results folder that another run is writing to; until it ends, it is this process's.

    The system lets go of it however the process ends. Where a disk knows no such locks, as some
    network disks don't, nothing is refused.
    """
    import fcntl  # Only here: Windows has none.

    results.mkdir(parents=True, exist_ok=True)
    lock = results / ".lock"
    try:
        # Some network disks lock only what is open for writing.
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        file = os.open(lock, os.O_RDONLY)  # a colleague's, in a folder of a group
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise InputError(
            f"{results}: a results folder must be written to by one run at a time. Found another "
            "one, which may have begun in another folder. Wait for it to end, or name another "
            "folder under `results`.",
            code="config.results_in_use",
        ) from error
    except OSError:
        os.close(file)


def knows_locks(file: int) -> bool:
    """Return whether the disk of an open file knows locks, whoever holds one."""
    import fcntl  # as above

    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    return True


def lock_tables_where_possible(results: Path) -> None:
    """Have HDF5 lock no file where the disk of a results folder knows no locks.

    Else PyTables would write nothing there. HDF5's own setting, BEST_EFFORT, ignores ENOSYS alone,
    not what network disks say. A job's file has a name of its own until it is whole.

    It counts for processes that this one starts, and here until PyTables is imported. What the
    environment says already stays.
    """
    if "HDF5_USE_FILE_LOCKING" in os.environ:
        return
    places = (results, *results.absolute().parents)
    # Nothing is written into a folder that takes no file.
    with suppress(OSError), tempfile.TemporaryFile(dir=next(filter(Path.is_dir, places))) as file:
        if not knows_locks(file.fileno()):
            os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"


def does_not_fit(path: Path, reason: str) -> InputError:
    """Return the error of a file that its disk did not take."""
    free = shutil.disk_usage(path.parent).free // 2**20
    return InputError(
        f"{path}: the disk must hold the whole file. Found: {reason}, with {free} MiB free. "
        "Nothing is left of the file. Make room, or raise the quota or limit, and run snakemake "
        "again: what is finished stays."
    )


@contextmanager
def written_whole(path: Path) -> Generator[Path, None, None]:
    """Give a place to write to; what stands there at the end appears under ``path`` at once.

    The folder is made. On an exception, such as that of a full disk, ``path`` stays as it was.

    Yields:
        A hidden name beside ``path`` that no other process uses. A killed process leaves it behind;
        the next one on the same machine that writes ``path`` deletes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{socket.gethostname()}."
    partial = path.with_name(f"{prefix}{os.getpid()}.part")
    _delete_leftovers(path, prefix)
    try:
        yield partial
        # Else a power cut could leave the new name on an empty file.
        descriptor = os.open(partial, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(path)
    except Exception as error:
        reason = None if isinstance(error, InputError) else no_room(error)
        if reason is None:
            raise
        raise does_not_fit(path, reason) from error
    finally:
        partial.unlink(missing_ok=True)


def harmless(cell: Any) -> Any:
    """Return a cell of a CSV: a text that a spreadsheet would run is quoted."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_RUN) else cell


def write_csv(path: Path, rows: "pd.DataFrame") -> None:
    """Write a table with a header; a text that a spreadsheet would run gets an apostrophe."""
    texts = {
        name: [harmless(cell) for cell in rows[name]]
        for name in rows
        if rows[name].dtype.kind not in "iufb"
    }
    with written_whole(path) as partial:
        rows.assign(**texts).rename(columns=harmless).to_csv(partial, index=False)


def _digest(known: dict[str, Any]) -> str:
    text = json.dumps(known, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_record(path: Path) -> dict[str, Any]:
    """Return what ``write_record`` wrote; empty if there is no such file, or a damaged one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = record["known"]
        return known if record["digest"] == _digest(known) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def write_record(path: Path, known: dict[str, Any], *, must: bool = True) -> None:
    """Write plain values with a hash of them, whole or not at all.

    Without ``must`` nothing is written into a folder that may only be read, as a colleague's.

    Raises:
        InputError: If the folder takes no such file (``config.results_folder``).
    """
    try:
        with written_whole(path) as partial:
            text = json.dumps({"known": known, "digest": _digest(known)}, indent=1)
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if must or not may_only_be_read(path.parent):
            raise takes_no_file(path.parent, path, error) from error


def may_only_be_read(folder: Path) -> bool:
    """Return whether a folder is there in which this process may write nothing."""
    try:
        return folder.is_dir() and not os.access(folder, os.W_OK)
    except PermissionError:  # a folder above it may not be looked into
        return False


def takes_no_file(results: Path, path: Path, error: OSError) -> InputError:
    """Return the error of a file, or of the folder itself, that could not be written."""
    named = Path(error.filename or path)
    # A temporary file's name says nothing.
    place = path if named.absolute().parent == results.absolute() else named
    return InputError(
        f"{results}: the results folder must be one that files can be written to. Found "
        f"{error.strerror or error} at {place}. Mend it, or name another one under `results`.",
        code="config.results_folder",
    )


def check_results(results: Path) -> None:
    """Refuse a results folder that takes no file."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        raise takes_no_file(results, results, error) from error


# Clocks of file systems stand still for up to two seconds: a file changed that lately may change
# once more under the same time.
CLOCK_NS = 2 * 10**9


def _files(pattern: str) -> Iterator[Path]:
    # A path may hold the signs of a pattern. Path.glob means other files by `**`, from version to
    # version of Python.
    names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # ruff: ignore[glob]
    for path in map(Path, names):
        if path.is_file():
            yield path
        # What Python and others leave in a folder of data comes and goes by itself.
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            files = (Path(folder, name) for name in names if not name.startswith("."))
            yield from (file for file in files if file.is_file())  # no link to nothing, no pipe


def matches(path: Path, pattern: str) -> bool:
    """Return whether a file of this path, there or not, would be among those of ``data_files``."""

    def fits(parts: Sequence[str], signs: Sequence[str]) -> bool:
        if not signs or not parts:
            return not signs  # all that a folder holds
        if signs[0] == "**":
            return any(fits(parts[i:], signs[1:]) for i in range(len(parts) + 1))
        return fnmatchcase(parts[0], signs[0]) and fits(parts[1:], signs[1:])

    plain = os.path.abspath
    return fits(Path(plain(path)).parts, Path(plain(pattern)).parts)


def _checked_files(pattern: str, results: Path) -> list[Path]:
    # The run's own results change while it runs. Links stay as they are: to ask the disk where
    # thousands of them lead takes long.
    plain = os.path.abspath
    folder = plain(results)
    files = [file for file in _files(pattern) if not Path(plain(file)).is_relative_to(folder)]
    if not files:
        raise InputError(
            "data_files: each entry must match at least one file. Hidden files and the results "
            f"folder don't count. Found nothing at {pattern!r} (from {Path.cwd()}).",
            code="config.missing_data_file",
        )
    return files


_DIGITS = 64  # of a SHA-256


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, 64 hexadecimal digits."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            f"{path}: the file must be readable. Found: {error.strerror or error}."
        ) from error


def _file_digests(files: Iterable[Path], record: Path, *, writes: bool) -> dict[str, str]:
    """Return ``file_digest`` of files, by path; one that stays as the record has it is not read.

    Size and times tell that, the time of the last change (ctime) among them. What the digests are
    does not depend on the record, which is brought up to date unless ``writes`` is false.
    """
    known, digests = read_record(record), {}
    kept = dict(known)
    for file in files:
        now, stat, name = time.time_ns(), file.stat(), file.as_posix()
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        *before, digest = known.get(name, [None])
        is_kept = before == seen and len(digest or "") == _DIGITS  # older versions kept others
        digests[name] = digest if is_kept else file_digest(file)
        kept[name] = [*seen, digests[name]]
        if stat.st_ctime_ns >= now - CLOCK_NS:
            del kept[name]
    if writes and kept != known:
        write_record(record, kept, must=False)
    return digests


def data_digests(patterns: Sequence[str], record: Path, *, writes: bool = True) -> dict[str, str]:
    """Return ``file_digest`` of files that a config names under ``data_files``, by path, in order.

    Patterns are paths of files, or of folders for all files below them, or patterns as in a shell,
    where ``**`` stands for any folders; relative to the working folder. Hidden files of a folder,
    and the run's own results, don't count. An entry without a readable file is refused. For the
    record, which lies in the results folder, see ``_file_digests``.
    """
    if not patterns:
        return {}
    files = {file for pattern in patterns for file in _checked_files(pattern, record.parent)}
    return _file_digests(sorted(files), record, writes=writes)


def path_digests(paths: Sequence[str], record: Path) -> dict[str, str]:
    """Return hashes of the content of files and folders, such as checkpoints, by path.

    All files of a folder count, except hidden ones.
    """
    files = {path: sorted(_files(path)) for path in paths}
    each = dict.fromkeys(file for own in files.values() for file in own)
    digests = _file_digests(each, record, writes=True)
    return {
        path: content_digest([
            [file.relative_to(path).as_posix(), digests[file.as_posix()]] for file in own
        ])
        for path, own in files.items()
    }

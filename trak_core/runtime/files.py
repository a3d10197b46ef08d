"""Write files atomically, lock the results folder, and keep digests of data files between runs.

Snakemake imports this module whenever it starts. To be fast, the module imports only the standard
library.
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
from trak_core.errors import InputError, disk_full_reason

if TYPE_CHECKING:
    import pandas as pd

# The error numbers of a file system that does not support locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
# The file in a results folder that contains the config of the last run.
CONFIG_RECORD = "config.json"
# A spreadsheet reads a cell as a formula if it begins with one of these characters. The last four
# are the full-width forms of the first four.
_FORMULA_STARTS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def _delete_leftovers(path: Path, prefix: str) -> None:
    """Delete the partial files that killed processes on this machine left next to ``path``.

    The name of a partial file consists of ``prefix``, the id of the process, and ``.part``.
    """
    if os.name != "posix":
        return  # On Windows, os.kill(process, 0) ends the process.
    for partial in path.parent.glob(f"{glob.escape(prefix)}*.part"):
        process = partial.name.removeprefix(prefix).removesuffix(".part")
        with suppress(PermissionError, ValueError):
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                partial.unlink(missing_ok=True)


def hold_results(results: Path) -> None:
    """Create a results folder, and lock it until this process ends.

    Raise an error if the folder is not writable, or if another run has locked it. On a file system
    without locks, the folder is not locked.
    """
    import fcntl  # It does not exist on Windows.

    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        raise unwritable_error(results, results, error) from error
    lock = results / ".lock"
    try:
        # Some network file systems can lock a file only if it is open for writing.
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        file = os.open(lock, os.O_RDONLY)  # Another user has created the file.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise InputError(
            f"{results}: only one run at a time may write to a results folder. Found another run "
            "that uses this folder. Wait for that run to end, or set another folder as `results`.",
            code="config.results_in_use",
        ) from error
    except OSError:
        os.close(file)


def supports_locks(file: int) -> bool:
    """Return whether the file system of an open file supports locks."""
    import fcntl  # It does not exist on Windows.

    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    return True


def lock_tables_where_possible(results: Path) -> None:
    """Turn off HDF5's file locks if the file system of a results folder does not support locks.

    Otherwise, PyTables could not write to the folder. Locks are not needed, because no two jobs
    write the same file. HDF5's setting BEST_EFFORT would not suffice, because it ignores only the
    error ENOSYS, and network file systems return other errors. If the user has set the environment
    variable ``HDF5_USE_FILE_LOCKING``, it is not changed.
    """
    if "HDF5_USE_FILE_LOCKING" in os.environ:
        return
    folders = (results, *results.absolute().parents)
    with suppress(OSError), tempfile.TemporaryFile(dir=next(filter(Path.is_dir, folders))) as file:
        if not supports_locks(file.fileno()):
            os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"


def disk_full_error(path: Path, reason: str) -> InputError:
    """Return the error for a file that does not fit on the disk, or exceeds a quota or limit."""
    free = shutil.disk_usage(path.parent).free // 2**20
    return InputError(
        f"{path}: the disk must have space for the file. Found: {reason}, with {free} MiB free. "
        "The partial file was deleted. Free some space, or raise the quota or limit. Then run "
        "snakemake again. Finished files are kept.",
        code="runtime.disk_full",
    )


@contextmanager
def atomic_write(path: Path) -> Generator[Path, None, None]:
    """Yield the path of a temporary file. At the end, the file is renamed to ``path``.

    The temporary file is a hidden file in the folder of ``path``, which is created if it does not
    exist. If an exception occurs, for example because the disk is full, ``path`` is unchanged. If
    the process is killed, the temporary file remains until a process on the same machine writes
    ``path`` again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{socket.gethostname()}."
    partial = path.with_name(f"{prefix}{os.getpid()}.part")
    _delete_leftovers(path, prefix)
    try:
        yield partial
        # Without fsync, a power failure could leave an empty file under the final name.
        with partial.open("r+b") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:
        reason = None if isinstance(error, InputError) else disk_full_reason(error)
        if reason is None:
            raise
        raise disk_full_error(path, reason) from error
    finally:
        partial.unlink(missing_ok=True)


def safe_cell(cell: Any) -> Any:
    """Return a cell for a CSV file, with an apostrophe before a text that looks like a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) else cell


def write_csv(path: Path, rows: "pd.DataFrame") -> None:
    """Write a table as CSV with a header. Texts are written as ``safe_cell`` returns them."""
    texts = {
        name: [safe_cell(cell) for cell in rows[name]]
        for name in rows
        if rows[name].dtype.kind not in "iufb"
    }
    with atomic_write(path) as partial:
        rows.assign(**texts).rename(columns=safe_cell).to_csv(partial, index=False)


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_record(path: Path) -> dict[str, Any]:
    """Return the values that ``write_record`` wrote, or {} if the file is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["known"] if record["digest"] == _digest(record["known"]) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def write_record(path: Path, values: dict[str, Any]) -> None:
    """Write values and their hash to a JSON file, unless its folder is read-only."""
    try:
        with atomic_write(path) as partial:
            text = json.dumps({"known": values, "digest": _digest(values)}, indent=1)
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if not _is_read_only(path.parent):
            raise unwritable_error(path.parent, path, error) from error


def _is_read_only(folder: Path) -> bool:
    try:
        return folder.is_dir() and not os.access(folder, os.W_OK)
    except PermissionError:  # A parent folder cannot be read.
        return False


def unwritable_error(results: Path, path: Path, error: OSError) -> InputError:
    """Return the error for a file in a results folder that could not be written."""
    named = Path(error.filename or path)
    # For a temporary file, the message shows `path`, because the user does not know the other name.
    failed = path if named.absolute().parent == results.absolute() else named
    return InputError(
        f"{results}: the results folder must be writable. Found {error.strerror or error} at "
        f"{failed}. Make the folder writable, or set another folder as `results`.",
        code="config.results_folder",
    )


# Path.resolve is not used, because it follows links, which takes too long for thousands of files.
_absolute = os.path.abspath
# Some file systems round times to two seconds. If a file changed less than two seconds ago, its
# digest is not recorded, because the file could change again without getting a new time.
CLOCK_NS = 2 * 10**9


def _files(pattern: str) -> Iterator[Path]:
    # If the path exists, it is not a pattern, even if its name contains characters such as [.
    # Path.glob is not used, because its meaning of `**` depends on the version of Python.
    names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)  # ruff: ignore[glob]
    for path in map(Path, names):
        if path.is_file():
            yield path
        # Hidden files and Python's caches are skipped, as they can change while the data do not.
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            files = (Path(folder, name) for name in names if not name.startswith("."))
            yield from (file for file in files if file.is_file())  # Skip broken links and pipes.


def matches(path: Path, pattern: str) -> bool:
    """Return whether a path, which need not exist, matches a pattern in ``data_files``."""

    def fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
        if not patterns or not names:
            return not patterns  # The pattern of a folder matches all files in the folder.
        if patterns[0] == "**":
            return any(fits(names[i:], patterns[1:]) for i in range(len(names) + 1))
        return fnmatchcase(names[0], patterns[0]) and fits(names[1:], patterns[1:])

    return fits(Path(_absolute(path)).parts, Path(_absolute(pattern)).parts)


def _checked_files(pattern: str, results: Path) -> list[Path]:
    # Results are not data: they change during a run, so their digests would change as well.
    folder = _absolute(results)
    files = [file for file in _files(pattern) if not Path(_absolute(file)).is_relative_to(folder)]
    if not files:
        raise InputError(
            "data_files: each entry must match at least one file. Hidden files and files in the "
            f"results folder do not count. Found nothing at {pattern!r}, relative to {Path.cwd()}.",
            code="config.missing_data_file",
        )
    return files


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            f"{path}: the file must be readable. Found: {error.strerror or error}.",
            code="runtime.unreadable",
        ) from error


def _file_digests(files: Iterable[Path], record: Path, *, writes: bool) -> dict[str, str]:
    """Return the hash that ``file_digest`` computes for each file, by path.

    The file ``record`` contains hashes from earlier calls. A file is read only if its size, mtime
    or ctime differs from the record. Unless ``writes`` is false, the record is updated.
    """
    known, digests = read_record(record), {}
    kept = dict(known)
    for file in files:
        now, stat, name = time.time_ns(), file.stat(), file.as_posix()
        seen = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        *before, digest = known.get(name, [""])
        # A digest of another length is from an older version, and is computed again.
        is_kept = before == seen and len(digest) == 64
        digests[name] = digest if is_kept else file_digest(file)
        kept[name] = [*seen, digests[name]]
        if stat.st_ctime_ns >= now - CLOCK_NS:
            del kept[name]
    if writes and kept != known:
        write_record(record, kept)
    return digests


def data_digests(patterns: Sequence[str], record: Path, *, writes: bool = True) -> dict[str, str]:
    """Return the hash of each file that matches a config's ``data_files``, by sorted path.

    A pattern is the path of a file, the path of a folder (for all files below it), or a shell
    pattern, in which ``**`` matches any number of folders. Hidden files and files in the results
    folder, which contains ``record``, are ignored. Raise an error if a pattern matches no file.
    """
    files = {file for pattern in patterns for file in _checked_files(pattern, record.parent)}
    return _file_digests(sorted(files), record, writes=writes)


def path_digests(paths: Sequence[str], record: Path) -> dict[str, str]:
    """Return a hash for each path of a file or a folder, whose hidden files are ignored."""
    files = {path: sorted(_files(path)) for path in paths}
    all_files = dict.fromkeys(file for in_path in files.values() for file in in_path)
    digests = _file_digests(all_files, record, writes=True)
    hashes = {}
    for path, in_path in files.items():
        pairs = [[file.relative_to(path).as_posix(), digests[file.as_posix()]] for file in in_path]
        hashes[path] = content_digest(pairs)
    return hashes

"""A file under its final name is whole: written beside it, on the disk, then renamed.

Standard library only: the Snakefile uses it too.
"""

import os
import shutil
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from trak_core.errors import InputError
from trak_core.system.faults import no_room


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

    Args:
        path: Final name; its folder is made. On an exception it stays as it was.

    Yields:
        A hidden name beside ``path`` that no other process uses. A killed process leaves it behind;
        the next one on the same machine that writes ``path`` deletes it.

    Raises:
        InputError: If the disk takes no more.
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

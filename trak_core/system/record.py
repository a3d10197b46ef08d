"""What is known of a study from an earlier start, in the results folder; standard library only."""

import hashlib
import json
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.system.whole_file import written_whole


def _digest(known: dict[str, Any]) -> str:
    text = json.dumps(known, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_record(path: Path) -> dict[str, Any]:
    """Return what ``write_record`` wrote; empty if there is no such file, or a damaged one.

    Nothing is lost with it but time: what it held is found out again.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = record["known"]
        return known if record["digest"] == _digest(known) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def write_record(path: Path, known: dict[str, Any]) -> None:
    """Write plain values with a hash of them, whole or not at all.

    Raises:
        InputError: If the folder cannot be written to.
    """
    try:
        with written_whole(path) as partial:
            text = json.dumps({"known": known, "digest": _digest(known)}, indent=1)
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path.parent}: the results folder must be one that files can be written to. Found "
            f"{error.strerror or error} at {error.filename or path}. Mend it, or name another one "
            "under `results`."
        ) from error

"""A file's specification and provenance: JSON in an attribute, but for their lists.

An attribute holds 64 KiB, and lists grow with a study: of its checkpoints, targets, retrained
models. Each is a vector in the group of the same name, one JSON text an element. With h5py alone:

    spec = json.loads(file.attrs["spec"])
    for key, rows in file.get("spec", {}).items():
        spec[key] = [json.loads(row) for row in rows[:]]
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np


def write_object(
    file: h5py.File, name: str, value: Mapping[str, Any], put: Callable[..., None]
) -> None:
    """Write plain values under a name: the lists among them as datasets, whatever their size.

    Args:
        file: Open for writing.
        name: Of the attribute and the group.
        value: Keys may hold no ``/``.
        put: Writes an attribute of a group or file.
    """
    lists = {key: part for key, part in value.items() if isinstance(part, list | tuple)}
    rest = {key: part for key, part in value.items() if key not in lists}
    put(file, **{name: json.dumps(rest, sort_keys=True)})
    for key in sorted(lists):
        # JSON is ASCII here. In one piece, without a checksum of its own: its chunks would cost KiB
        # of index a list, and the content hash covers them.
        texts = [json.dumps(element, sort_keys=True).encode() for element in lists[key]]
        file[f"{name}/{key}"] = np.array(texts, dtype="S")


def read_object(file: h5py.File, name: str) -> dict[str, Any]:
    """Return what ``write_object`` wrote.

    Raises:
        ValueError: If it is no such thing.
    """
    text = file.attrs[name]
    found = json.loads(text.decode() if isinstance(text, bytes) else str(text))
    if not isinstance(found, dict):
        raise ValueError(f"an attribute must be a JSON object, found {type(found).__name__}")
    lists: Any = file.get(name, {})  # files of before had none
    return found | {key: [json.loads(row) for row in rows[:]] for key, rows in lists.items()}

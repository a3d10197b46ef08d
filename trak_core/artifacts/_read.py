"""Reading an artifact, after making sure of all of it."""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from trak_core.artifacts._format import (
    KINDS,
    VERSION,
    ArtifactError,
    Kind,
    content_hash,
    plain_ids,
    table_columns,
)
from trak_core.artifacts._layout import check_layout
from trak_core.artifacts._seal import seal_holds


def _text(attribute: Any) -> Any:
    """Return an attribute as text, where it is one."""
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def _plain(attribute: Any) -> dict[str, Any]:
    """Return an attribute's JSON object as plain values."""
    found = json.loads(str(_text(attribute)))
    if not isinstance(found, dict):
        raise ValueError(f"an attribute must be a JSON object, found {type(found).__name__}")
    return found


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified file, open for reading; see ``open_artifact``."""

    path: Path
    kind: Kind
    file: h5py.File
    spec: dict[str, Any]
    provenance: dict[str, Any]
    content_hash: str

    def attribute(self, name: str) -> Any:
        """Return one of the file's own attributes: text, or a number."""
        value = np.asarray(self.file.attrs[name]).item()
        return value.decode() if isinstance(value, bytes) else value

    def _dataset(self, key: str) -> h5py.Dataset:
        dataset = self.file.get(key)
        if not isinstance(dataset, h5py.Dataset):
            raise _refused(
                self.path, self.kind, f"what reads this file needs {key!r}", "No such dataset"
            )
        return dataset

    def matrix(self, key: str) -> h5py.Dataset:
        """Return the values of a frame, to be read by blocks."""
        return self._dataset(f"{key}/block0_values")

    def index(self, key: str) -> list[Any]:
        """Return the row ids of a frame."""
        return plain_ids(self.vector(f"{key}/axis1"))

    def columns(self, key: str) -> list[Any]:
        """Return the column ids of a frame."""
        return plain_ids(self.vector(f"{key}/axis0"))

    def has(self, key: str) -> bool:
        """Return whether the file holds this key."""
        return key in self.file

    def vector(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return one value a sample, of all samples or those from ``start`` to ``stop``."""
        return np.asarray(self._dataset(key)[start:stop])

    def ids(self, key: str) -> list[Any]:
        """Return ids stored as a vector."""
        return plain_ids(self.vector(key))

    def scalar(self, key: str) -> float:
        """Return one number."""
        return float(np.asarray(self._dataset(key)[()]))

    def table(self, key: str) -> pd.DataFrame:
        """Return a table, as pandas reads it but without unpickling anything.

        Raises:
            ArtifactError: If there is none, or if it was written before tables said where their
                columns lie.
        """
        places = self.file[key].attrs.get("columns") if key in self.file else None
        if places is None:
            must = f"what reads this file needs a table {key!r} that says where its columns lie"
            found = (
                f"Found it in none of {', '.join(self.file)}: an earlier version's file has none"
            )
            raise _refused(self.path, self.kind, must, found)
        columns = json.loads(str(_text(places)))
        return pd.DataFrame(table_columns(self._dataset(f"{key}/table"), columns))


def _refused(path: Path, kind: Kind, must: str, found: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: {must}. {found}. Delete the file and run snakemake again: rule {kind.rule} "
        "remakes it."
    )


@contextlib.contextmanager
def _explained(path: Path, kind: Kind) -> Generator[None, None, None]:
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        # What h5py makes of damaged metadata is open-ended: any error is the file's.
        found = (str(error).splitlines() or [type(error).__name__])[0]
        must = f"a {kind.encoding_type} file must be whole"
        raise _refused(path, kind, must, f"Reading it failed: {found}") from error


def _verified(path: Path, kind: Kind, file: h5py.File, sealed: bool) -> Artifact:
    with _explained(path, kind):
        return _checked(path, kind, file, sealed)


def _checked(path: Path, kind: Kind, file: h5py.File, sealed: bool) -> Artifact:
    name = kind.encoding_type
    found = tuple(_text(file.attrs.get(f"encoding-{part}")) for part in ("type", "version"))
    if found != (name, VERSION):
        raise _refused(
            path,
            kind,
            f"the file must be {name}, version {VERSION}",
            f"Found {found[0]}, version {found[1]}",
        )
    missing = [key for key in kind.keys if key not in file]
    if missing:
        must = f"a {name} file must hold {', '.join(kind.keys)}"
        raise _refused(path, kind, must, f"Missing: {', '.join(missing)}")
    stored = str(_text(file.attrs["content-hash"]))
    # Sealed bytes are those that this hash was made of.
    computed = stored if sealed else content_hash(file)
    if stored != computed:
        raise _refused(
            path,
            kind,
            "the content must have the hash stored with it",
            f"Found {computed}, stored {stored}: the file was changed or damaged",
        )
    check_layout(file, kind)
    spec, provenance = (_plain(file.attrs[key]) for key in ("spec", "provenance"))
    return Artifact(path, kind, file, spec, provenance, computed)


def _opened(path: Path, kind: Kind) -> tuple[h5py.File, bool]:
    """Return the open file, and whether its bytes are known to be those that were written."""
    name = kind.encoding_type
    if not path.is_file():
        raise _refused(path, kind, f"a {name} file must be here", "Found nothing")
    try:
        sealed = seal_holds(path)
        if sealed is not False:
            # Blocks are read once: a cache a file would add up over the checkpoints.
            return h5py.File(path, "r", rdcc_nbytes=0), bool(sealed)
    except OSError as error:
        found = f"Found {(str(error).splitlines() or [''])[0]}"
        raise _refused(path, kind, f"a {name} file must be readable HDF5", found) from error
    must = "every byte must be as it was written"
    raise _refused(path, kind, must, "The hash at the end differs: the file was damaged")


@contextlib.contextmanager
def open_artifact(path: Path, kind: Kind) -> Generator[Artifact, None, None]:
    """Open an artifact after making sure of all of it.

    Args:
        path: The file.
        kind: What it must be.

    Yields:
        The open artifact.

    Raises:
        ArtifactError: If the file is not there, damaged, of another kind or version, incomplete,
            of shapes that don't fit together, or not finite. It names the file, what was expected
            and found, and the rule that remakes it.
    """
    file, sealed = _opened(path, kind)
    with file:
        yield _verified(path, kind, file, sealed)


def verify(path: Path) -> Kind:
    """Make sure of a file of any kind, as every job does with the files that it reads.

    pandas and h5py alone notice damage in bulk data only.

    Args:
        path: The file.

    Returns:
        What it is.

    Raises:
        ArtifactError: If anything is wrong with it; see ``open_artifact``.
    """
    unknown = Kind("trak-*", (), "of that name")
    file, sealed = _opened(path, unknown)
    with file, _explained(path, unknown):
        name = _text(file.attrs.get("encoding-type"))
        alike = [kind for kind in KINDS if kind.encoding_type == name]
        if not alike:
            known = ", ".join(dict.fromkeys(kind.encoding_type for kind in KINDS))
            raise _refused(path, unknown, f"the file must be one of {known}", f"Found {name}")
        kind = next((k for k in alike if all(key in file for key in k.keys)), alike[-1])
        _verified(path, kind, file, sealed)
    return kind

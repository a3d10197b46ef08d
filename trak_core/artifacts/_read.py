"""Reading an artifact, after making sure of all of it."""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from trak_core.artifacts._format import (
    KINDS,
    VERSION,
    ArtifactError,
    Kind,
    content_hash,
    plain_ids,
    table_columns,
)
from trak_core.artifacts._held import Held
from trak_core.artifacts._layout import check_layout
from trak_core.artifacts._objects import read_object
from trak_core.artifacts._seal import seal_holds

if TYPE_CHECKING:  # most jobs read no table
    import pandas as pd


def _text(attribute: Any) -> Any:
    """Return an attribute as text, where it is one."""
    return attribute.decode() if isinstance(attribute, bytes) else attribute


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified file, open for reading; see ``open_artifact``."""

    path: Path
    kind: Kind
    held: Held
    spec: dict[str, Any]
    provenance: dict[str, Any]
    content_hash: str

    @property
    def file(self) -> h5py.File:
        """The file itself, valid until another artifact is read."""
        try:
            return self.held.file()
        except OSError as error:
            must = "a file must stay as it is while a job reads it"
            raise _refused(self.path, self.kind, must, f"Found: {error}") from error

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

    def matrix(self, key: str) -> "Rows":
        """Return the values of a frame, to be read by blocks."""
        dataset = self._dataset(f"{key}/block0_values")
        return Rows(self, f"{key}/block0_values", dataset.shape, dataset.dtype)

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

    def table(self, key: str) -> "pd.DataFrame":
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
        import pandas as pd

        return pd.DataFrame(table_columns(self._dataset(f"{key}/table"), columns))


@dataclass(frozen=True, slots=True)
class Rows:
    """The values of a frame, which are read when they are asked for: ``rows[start:stop]``."""

    artifact: Artifact
    key: str
    shape: tuple[int, int]
    dtype: np.dtype

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Read some rows."""
        return self.artifact._dataset(self.key)[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read all rows."""
        return np.asarray(self[:], dtype)


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


def _verified(held: Held, kind: Kind, sealed: bool) -> Artifact:
    with _explained(held.path, kind):
        return _checked(held, kind, sealed)


def _checked(held: Held, kind: Kind, sealed: bool) -> Artifact:
    path, file, name = held.path, held.file(), kind.encoding_type
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
    spec, provenance = (read_object(file, name) for name in ("spec", "provenance"))
    return Artifact(path, kind, held, spec, provenance, computed)


def _opened(path: Path, kind: Kind) -> tuple[Held, bool]:
    """Return the open file, and whether its bytes are known to be those that were written."""
    name = kind.encoding_type
    if not path.is_file():
        raise _refused(path, kind, f"a {name} file must be here", "Found nothing")
    try:
        held, sealed = Held(path), seal_holds(path)
        if sealed is not False:
            held.file()
            return held, bool(sealed)
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
    held, sealed = _opened(path, kind)
    with contextlib.closing(held):
        yield _verified(held, kind, sealed)


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
    held, sealed = _opened(path, unknown)
    with contextlib.closing(held), _explained(path, unknown):
        file = held.file()
        name = _text(file.attrs.get("encoding-type"))
        alike = [kind for kind in KINDS if kind.encoding_type == name]
        if not alike:
            known = ", ".join(dict.fromkeys(kind.encoding_type for kind in KINDS))
            raise _refused(path, unknown, f"the file must be one of {known}", f"Found {name}")
        kind = next((k for k in alike if all(key in file for key in k.keys)), alike[-1])
        _verified(held, kind, sealed)
    return kind

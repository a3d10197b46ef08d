"""Reading an artifact, after making sure of all of it."""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from trak_core.artifacts._format import VERSION, ArtifactError, Kind, content_hash, plain_ids


def _plain(attribute: Any) -> dict[str, Any]:
    """Return an attribute's JSON as plain values."""
    return json.loads(attribute.decode() if isinstance(attribute, bytes) else str(attribute))


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified file, open for reading; see ``open_artifact``."""

    path: Path
    file: h5py.File
    spec: dict[str, Any]
    content_hash: str

    @property
    def provenance(self) -> dict[str, Any]:
        """What made the file: versions, code digest and device."""
        return _plain(self.file.attrs["provenance"])

    def attribute(self, name: str) -> Any:
        """Return one of the file's own attributes: text, or a number."""
        value = np.asarray(self.file.attrs[name]).item()
        return value.decode() if isinstance(value, bytes) else value

    def _dataset(self, key: str) -> h5py.Dataset:
        dataset = self.file[key]
        assert isinstance(dataset, h5py.Dataset)
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
            or not finite. It names the file, what was expected and found, and the rule that
            remakes it.
    """
    name = kind.encoding_type
    remake = f"Delete the file and run snakemake again: rule {kind.rule} remakes it."
    if not path.is_file():
        raise ArtifactError(f"{path}: a {name} file must be here. Found nothing. {remake}")
    try:
        # Blocks are read once: a cache a file would add up over the checkpoints.
        file = h5py.File(path, "r", rdcc_nbytes=0)
    except OSError as error:
        raise ArtifactError(
            f"{path}: a {name} file must be readable HDF5. Found {str(error).splitlines()[0]}. "
            f"{remake}"
        ) from error
    with file:
        try:
            found = (file.attrs.get("encoding-type"), file.attrs.get("encoding-version"))
            found = tuple(v.decode() if isinstance(v, bytes) else v for v in found)
            if found != (name, VERSION):
                raise ArtifactError(
                    f"{path}: the file must be {name}, version {VERSION}. Found {found[0]}, "
                    f"version {found[1]}. {remake}"
                )
            missing = [key for key in kind.keys if key not in file]
            if missing:
                raise ArtifactError(
                    f"{path}: a {name} file must hold {', '.join(kind.keys)}. Missing: "
                    f"{', '.join(missing)}. {remake}"
                )
            stored = file.attrs.get("content-hash")
            stored = stored.decode() if isinstance(stored, bytes) else stored
            computed = content_hash(file)
            if stored != computed:
                raise ArtifactError(
                    f"{path}: the content must have the hash stored with it. Found {computed}, "
                    f"stored {stored}: the file was changed or damaged. {remake}"
                )
            spec = _plain(file.attrs["spec"])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(
                f"{path}: a {name} file must be whole. Reading it failed: "
                f"{str(error).splitlines()[0]}. {remake}"
            ) from error
        yield Artifact(path, file, spec, computed)

"""Read artifacts, after making sure of all of them, and frames that users wrote with pandas.

Nothing is unpickled. HDF5 compares checksums of what it reads: whoever needs little of a file reads
little of it. Few files are open at a time, because one job may read thousands: an open HDF5 file
takes 0.8 MB, and on most systems a process may have 1,024 files open.
"""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from trak_core.artifacts.format import (
    KINDS,
    VERSION,
    ArtifactError,
    ArtifactKind,
    check_layout,
    check_stored,
    content_hash,
    dataset_in,
    plain_ids,
    read_object,
    scales_of,
    table_columns,
)
from trak_core.system.files import knows_locks

if TYPE_CHECKING:  # most jobs read no table
    import pandas as pd


_MOST_OPEN = 64


def _signature(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class _HeldFile:
    """A file that opens when it is read; beyond a number, the least recently used one closes."""

    _open: dict["_HeldFile", h5py.File] = {}  # by last use  # ruff: ignore[mutable-class-default]

    def __init__(self, path: Path) -> None:
        """Remember which file lies at a path; an ``OSError`` if there is none."""
        self.path, self._seen = path, _signature(path)

    def file(self) -> h5py.File:
        """Return the open file, valid until another is read; an ``OSError`` if it was replaced."""
        file = self._open.pop(self, None)
        if file is None:
            while len(self._open) >= _MOST_OPEN:
                next(iter(self._open)).close()
            # Blocks are read once: a cache a file would add up over the checkpoints.
            # A whole file changes no more: it needs no lock, which some disks don't know.
            file = h5py.File(self.path, "r", rdcc_nbytes=0, locking=False)
            if _signature(self.path) != self._seen:
                file.close()
                raise OSError("it was replaced or changed while it was read")
        self._open[self] = file
        return file

    def close(self) -> None:
        """Close the file, if it is open."""
        with contextlib.suppress(KeyError):
            self._open.pop(self).close()


def _text(attribute: Any) -> Any:
    """Return an attribute as text, where it is one."""
    return attribute.decode() if isinstance(attribute, bytes) else attribute


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified file, open for reading; see ``open_artifact``."""

    path: Path
    kind: ArtifactKind
    held: _HeldFile
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
        return _text(np.asarray(self.file.attrs[name]).item())

    def _dataset(self, key: str) -> h5py.Dataset:
        dataset = self.file.get(key)
        if not isinstance(dataset, h5py.Dataset):
            must = f"what reads this file needs {key!r}"
            raise _refused(self.path, self.kind, must, "No such dataset")
        return dataset

    def _read(self, key: str, rows: Any) -> np.ndarray:
        with _explained(self.path, self.kind, f"Reading {key!r}"):
            return self._dataset(key)[rows]

    def matrix(self, key: str) -> "Rows":
        """Return the values of a frame, to read by blocks."""
        dataset = self._dataset(f"{key}/block0_values")
        scales = scales_of(key) if dataset.dtype == np.int8 else None
        return Rows(self, f"{key}/block0_values", dataset.shape, dataset.dtype, scales)

    def index(self, key: str) -> list[Any]:
        """Return the row ids of a frame."""
        return plain_ids(self.vector(f"{key}/axis1"))

    def columns(self, key: str) -> list[Any]:
        """Return the column ids of a frame."""
        return plain_ids(self.vector(f"{key}/axis0"))

    def has(self, key: str) -> bool:
        """Return whether the file holds this key."""
        with _explained(self.path, self.kind, f"Looking for {key!r}"):
            return key in self.file

    def vector(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return one value a sample, of all samples or those from ``start`` to ``stop``."""
        return np.asarray(self._read(key, slice(start, stop)))

    def ids(self, key: str) -> list[Any]:
        """Return ids stored as a vector."""
        return plain_ids(self.vector(key))

    def scalar(self, key: str) -> float:
        """Return one number."""
        return float(np.asarray(self._read(key, ())))

    def table(self, key: str) -> "pd.DataFrame":
        """Return a table, as pandas reads it but without unpickling anything."""
        import pandas as pd

        with _explained(self.path, self.kind, f"Reading {key!r}"):
            columns = json.loads(str(_text(self.file[key].attrs["columns"])))
            return pd.DataFrame(table_columns(self._dataset(f"{key}/table"), columns))


@dataclass(frozen=True, slots=True)
class Rows:
    """The values of a frame, which ``rows[start:stop]`` reads: int8 as float32, by their scales.

    ``key`` is the dataset of the values, ``dtype`` how they are stored, and ``scales`` the vector
    of the rows' scales; None where values are stored as they are.
    """

    artifact: Artifact
    key: str
    shape: tuple[int, int]
    dtype: np.dtype
    scales: str | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Read some rows."""
        values = self.artifact._read(self.key, rows)
        if self.scales is None:
            return values
        # Float32 holds these products exactly.
        chosen = rows[0] if isinstance(rows, tuple) else rows
        scales = self.artifact._read(self.scales, chosen)
        return values * (scales[..., None] if np.ndim(values) > np.ndim(scales) else scales)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read all rows."""
        return np.asarray(self[:], dtype)


def _refused(path: Path, kind: ArtifactKind, must: str, finding: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: {must}. {finding}. Delete the file and run snakemake again: rule {kind.rule} "
        "remakes it."
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _explained(
    path: Path, kind: ArtifactKind, doing: str = "Reading it"
) -> Generator[None, None, None]:
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        # What h5py makes of damaged metadata is open-ended: any error is the file's.
        must = f"a {kind.encoding_type} file must be whole, as it was written"
        raise _refused(path, kind, must, f"{doing} failed: {_first_line(error)}") from error


def _verified(held: _HeldFile, kind: ArtifactKind) -> Artifact:
    """Return the artifact in a file whose metadata is what its kind must have."""
    path, name = held.path, kind.encoding_type
    with _explained(path, kind):
        file = held.file()
        own_name, version = (_text(file.attrs.get(f"encoding-{of}")) for of in ("type", "version"))
        if (own_name, version) != (name, VERSION):
            must = f"the file must be {name}, version {VERSION}"
            raise _refused(path, kind, must, f"Found {own_name}, version {version}")
        missing = [key for key in kind.keys if key not in file]
        if missing:
            must = f"a {name} file must hold {', '.join(kind.keys)}"
            raise _refused(path, kind, must, f"Missing: {', '.join(missing)}")
        check_layout(file, kind)
        spec, provenance = (read_object(file, part) for part in ("spec", "provenance"))
        return Artifact(path, kind, held, spec, provenance, str(_text(file.attrs["content-hash"])))


@contextlib.contextmanager
def _opened(path: Path, kind: ArtifactKind) -> Generator[_HeldFile, None, None]:
    """Yield a file all of whose values lie in it."""
    if not path.is_file():
        raise _refused(path, kind, f"a {kind.encoding_type} file must be here", "Found nothing")
    held = _HeldFile(path)
    with contextlib.closing(held):
        with _explained(path, kind):
            file = held.file()
            names: list[str] = []
            file.visititems_links(lambda name, _link: names.append(name))
            for name in names:
                check_stored(file, name)
        yield held


@contextlib.contextmanager
def open_artifact(path: Path, kind: ArtifactKind) -> Generator[Artifact, None, None]:
    """Yield an artifact for a ``with`` block, after making sure of what it is.

    Damage is refused at the latest when the numbers are read that it is in, except numbers that
    became zeros together with their checksum, which ``verify`` finds.

    Raises:
        ArtifactError: If the file is not there, damaged, of another kind or version, incomplete,
            or of shapes that don't fit together. It names the file, what was expected and found,
            and the rule that remakes it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from trak_core.artifacts import NORMAL_MATRIX, create, open_artifact
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name, "normal_matrix.h5")
        >>> with create(path, NORMAL_MATRIX, spec={"weighting": "plain"}, provenance={}) as file:
        ...     file.matrix("normal_matrix", range(2), range(2))[:] = [[2, 1], [1, 2]]
        ...     file.scalar("mean_squared_norm", 4)
        >>> with open_artifact(path, NORMAL_MATRIX) as file:
        ...     print(file.spec, file.matrix("normal_matrix")[1])
        {'weighting': 'plain'} [1. 2.]
        >>> folder.cleanup()
    """
    with _opened(path, kind) as held:
        yield _verified(held, kind)


def verify(path: Path) -> ArtifactKind:
    """Return a file's kind, after reading all of it and comparing its content hash.

    See ``open_artifact`` for the errors.
    """
    unknown = ArtifactKind("trak-*", (), "of that name")
    with _opened(path, unknown) as held, _explained(path, unknown):
        file = held.file()
        name = _text(file.attrs.get("encoding-type"))
        alike = [kind for kind in KINDS if kind.encoding_type == name]
        if not alike:
            known = ", ".join(dict.fromkeys(kind.encoding_type for kind in KINDS))
            raise _refused(path, unknown, f"the file must be one of {known}", f"Found {name}")
        kind = next((k for k in alike if all(key in file for key in k.keys)), alike[-1])
        if _verified(held, kind).content_hash != content_hash(file):
            raise ValueError("its content hash differs")
    return kind


def read_frame(path: Path, key: str) -> tuple[np.ndarray, list[Any], list[Any]]:
    """Read a frame of one dtype that ``frame.to_hdf(path, key=key)`` wrote; refuse anything else.

    Its values must lie in the file itself.

    Returns:
        Values of shape (rows, columns), row ids and column ids.
    """
    must = (
        f"{path}: the file must be readable HDF5 that holds a frame {key!r} of numbers, whole and "
        "finite, under ids that are all integers or all strings"
    )
    how = f"Write it with `frame.to_hdf(path, key={key!r}, format='fixed')`."
    try:
        with path.open("rb") as raw:
            locking = None if knows_locks(raw.fileno()) else False
        with h5py.File(path, "r", locking=locking) as file:
            parts = [f"{key}/{part}" for part in ("block0_values", "axis1", "axis0")]
            if any(part not in file for part in parts) or f"{key}/block1_values" in file:
                holds = ", ".join(file) or "nothing"
                raise ValueError(f"{holds}, not in pandas' fixed layout, or of several dtypes")
            for name in (key, *parts):
                check_stored(file, name)
            values, index, columns = (np.asarray(dataset_in(file, part)) for part in parts)
            row_ids, column_ids = plain_ids(index), plain_ids(columns)
        if values.dtype.kind not in "biuf" or not {index.dtype.kind, columns.dtype.kind} <= set(
            "iuS"
        ):
            raise ValueError(f"values of {values.dtype}, ids of {index.dtype} and {columns.dtype}")
        if values.shape != (len(index), len(columns)) or not np.isfinite(values).all():
            size = f"{len(index)} rows and {len(columns)} columns"
            raise ValueError(f"{values.shape} values for {size}, or NaN among them")
    except MemoryError:
        raise
    except Exception as error:  # as above: a damaged file's errors are of any kind
        raise ArtifactError(f"{must}. Found: {_first_line(error)}. {how}") from error
    return values, row_ids, column_ids

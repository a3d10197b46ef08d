"""Read and check artifacts, and read frames that users wrote with pandas.

No pickled data are loaded, because they could run code. HDF5 verifies checksums while it reads.
"""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
from trak_core.errors import first_line
from trak_core.runtime.files import supports_locks

if TYPE_CHECKING:  # At run time, only jobs that read a table import pandas.
    import pandas as pd


_MOST_OPEN = 64


def _signature(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _text(attribute: Any) -> Any:
    return attribute.decode() if isinstance(attribute, bytes) else attribute


class Artifact:
    """A finished artifact, whose matrices, vectors and tables can be read from its file.

    ``open_artifact`` returns an instance after checking the file. Only the 64 files that were read
    last stay open, because an open HDF5 file takes 0.8 MB, and most systems allow a process 1,024
    open files. Other files are opened again when they are read.
    """

    # The open files of all artifacts, in the order in which they were last used.
    _open: ClassVar[dict["Artifact", h5py.File]] = {}
    spec: dict[str, Any]
    provenance: dict[str, Any]
    content_hash: str

    def __init__(self, path: Path, kind: ArtifactKind) -> None:
        """Check that the file exists. ``check_metadata`` reads the spec and other metadata."""
        self.path, self.kind = path, kind
        if not path.is_file():
            raise self._refused(f"a {kind.encoding_type} file must exist", "There is no file")
        self._seen = _signature(path)

    def _refused(self, must: str, finding: str) -> ArtifactError:
        maker = f"rule {self.kind.rule}" if self.kind.rule else "its rule"
        return ArtifactError(
            f"{self.path}: {must}. {finding}. Delete the file and run snakemake again, so that "
            f"{maker} remakes it.",
            code="artifacts.damaged",
        )

    @contextlib.contextmanager
    def _explained(self, doing: str = "Reading it") -> Generator[None, None, None]:
        try:
            yield
        except ArtifactError:
            raise
        except Exception as error:
            # If metadata are damaged, h5py can raise errors of any type.
            must = f"a {self.kind.encoding_type} file must be complete and unchanged"
            raise self._refused(must, f"{doing} failed: {first_line(error)}") from error

    def _file(self) -> h5py.File:
        """Return the open file. Raise an ``OSError`` if it was replaced after ``__init__``."""
        file = self._open.pop(self, None)
        if file is None:
            while len(self._open) >= _MOST_OPEN:
                next(iter(self._open)).close()
            # A chunk cache would not help, because each block is read only once. The file is not
            # locked, because it no longer changes, and some file systems do not support locks.
            file = h5py.File(self.path, "r", rdcc_nbytes=0, locking=False)
            if _signature(self.path) != self._seen:
                file.close()
                raise OSError("it was replaced or changed while it was read")
        self._open[self] = file
        return file

    def close(self) -> None:
        """Close the file. Reading the artifact opens it again."""
        with contextlib.suppress(KeyError):
            self._open.pop(self).close()

    def check_values(self) -> None:
        """Check that no dataset has values that are missing or stored in another file."""
        with self._explained():
            file, names = self._file(), []
            file.visititems_links(lambda name, _link: names.append(name))
            for name in names:
                check_stored(file, name)

    def check_metadata(self) -> None:
        """Check the kind and layout of the file, and read its spec, provenance and hash."""
        name, keys = self.kind.encoding_type, self.kind.keys
        with self._explained():
            file = self._file()
            stored = tuple(_text(file.attrs.get(f"encoding-{of}")) for of in ("type", "version"))
            if stored != (name, VERSION):
                must = f"the file must be {name}, version {VERSION}"
                raise self._refused(must, f"Found {stored[0]}, version {stored[1]}")
            if missing := [key for key in keys if key not in file]:
                must = f"a {name} file must contain {', '.join(keys)}"
                raise self._refused(must, f"Missing: {', '.join(missing)}")
            check_layout(file, self.kind)
            self.spec, self.provenance = (read_object(file, of) for of in ("spec", "provenance"))
            self.content_hash = str(_text(file.attrs["content-hash"]))

    @property
    def file(self) -> h5py.File:
        """The open HDF5 file. It may be closed when another artifact is read."""
        try:
            return self._file()
        except OSError as error:
            must = "a file must not change while a job reads it"
            raise self._refused(must, f"Opening it again failed: {error}") from error

    def attribute(self, name: str) -> Any:
        """Return the text or number that is stored as an attribute of the file."""
        return _text(np.asarray(self.file.attrs[name]).item())

    def _dataset(self, key: str) -> h5py.Dataset:
        dataset = self.file.get(key)
        if not isinstance(dataset, h5py.Dataset):
            must = f"a reader of this file needs {key!r}"
            raise self._refused(must, "The file has no such dataset")
        return dataset

    def _read(self, key: str, rows: Any) -> np.ndarray:
        with self._explained(f"Reading {key!r}"):
            return self._dataset(key)[rows]

    def matrix(self, key: str) -> "Rows":
        """Return the values of a matrix, which are read from the file when they are indexed."""
        dataset = self._dataset(f"{key}/block0_values")
        scales = scales_of(key) if dataset.dtype == np.int8 else None
        return Rows(self, f"{key}/block0_values", dataset.shape, dataset.dtype, scales)

    def index(self, key: str) -> list[Any]:
        """Return the row ids of a matrix."""
        return self.ids(f"{key}/axis1")

    def columns(self, key: str) -> list[Any]:
        """Return the column ids of a matrix."""
        return self.ids(f"{key}/axis0")

    def has(self, key: str) -> bool:
        """Return whether the file contains a dataset or group named ``key``."""
        with self._explained(f"Looking for {key!r}"):
            return key in self.file

    def vector(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a vector, or its entries from ``start`` to ``stop``."""
        return np.asarray(self._read(key, slice(start, stop)))

    def ids(self, key: str) -> list[Any]:
        """Return a vector of ids as integers or strings."""
        return plain_ids(self.vector(key))

    def scalar(self, key: str) -> float:
        """Return the number that is stored as ``key``."""
        return float(np.asarray(self._read(key, ())))

    def table(self, key: str) -> "pd.DataFrame":
        """Return a table as ``pandas.read_hdf`` would, but without loading pickled data."""
        import pandas as pd

        with self._explained(f"Reading {key!r}"):
            columns = json.loads(str(_text(self.file[key].attrs["columns"])))
            return pd.DataFrame(table_columns(self._dataset(f"{key}/table"), columns))


@dataclass(frozen=True, slots=True)
class Rows:
    """The values of a matrix in a file. ``rows[start:stop]`` reads rows from the file.

    ``key`` is the name of the dataset. If its values are int8, ``scales`` is the name of the
    dataset with a scale for each row. Rows are multiplied by their scales, which gives float32.
    """

    artifact: Artifact
    key: str
    shape: tuple[int, int]
    dtype: np.dtype
    scales: str | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        values = self.artifact._read(self.key, rows)
        if self.scales is None:
            return values
        # The products are exact in float32, because scales have few significant bits.
        scales = self.artifact._read(self.scales, rows[0] if isinstance(rows, tuple) else rows)
        return values * (scales[..., None] if np.ndim(values) > np.ndim(scales) else scales)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


@contextlib.contextmanager
def open_artifact(path: Path, kind: ArtifactKind) -> Generator[Artifact, None, None]:
    """Yield an artifact for a ``with`` block, after checking its metadata.

    Numbers are checked by checksums when they are read. These checks miss only damage that turned
    both the numbers and their checksum into zeros. ``verify`` also detects such damage.

    Raises:
        ArtifactError: If the file is missing, damaged, incomplete, or of another kind or version,
            or if the shapes of its arrays do not match. The message names the rule that writes the
            file again.

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
    with contextlib.closing(Artifact(path, kind)) as artifact:
        artifact.check_values()
        artifact.check_metadata()
        yield artifact


def verify(path: Path) -> ArtifactKind:
    """Return the kind of an artifact, after checking that its content has the stored hash."""
    artifact = Artifact(path, ArtifactKind("trak-*", (), ""))
    with contextlib.closing(artifact), artifact._explained():
        artifact.check_values()
        file = artifact.file
        name = _text(file.attrs.get("encoding-type"))
        alike = [kind for kind in KINDS if kind.encoding_type == name]
        if not alike:
            known = ", ".join(dict.fromkeys(kind.encoding_type for kind in KINDS))
            raise artifact._refused(f"the file must be one of {known}", f"Found {name}")
        has_keys = (kind for kind in alike if all(key in file for key in kind.keys))
        artifact.kind = next(has_keys, alike[-1])
        artifact.check_metadata()
        if artifact.content_hash != content_hash(file):
            raise ValueError("the hash of its content differs from the stored hash")
    return artifact.kind


def read_frame(path: Path, key: str) -> tuple[np.ndarray, list[Any], list[Any]]:
    """Return the values, row ids and column ids of a frame that ``frame.to_hdf`` wrote.

    The values have shape (rows, columns), and all have the same dtype.
    """
    try:
        with path.open("rb") as raw:
            locking = None if supports_locks(raw.fileno()) else False
        with h5py.File(path, "r", locking=locking) as file:
            parts = [f"{key}/{part}" for part in ("block0_values", "axis1", "axis0")]
            if any(part not in file for part in parts) or f"{key}/block1_values" in file:
                holds = ", ".join(file) or "nothing"
                raise ValueError(
                    f"{holds}, but not in pandas' fixed layout, or with columns of several dtypes"
                )
            for name in (key, *parts):
                check_stored(file, name)
            values, index, columns = (np.asarray(dataset_in(file, part)) for part in parts)
            row_ids, column_ids = plain_ids(index), plain_ids(columns)
        kinds = {index.dtype.kind, columns.dtype.kind}
        if values.dtype.kind not in "biuf" or not kinds <= set("iuS"):
            raise ValueError(
                f"values of dtype {values.dtype}, row ids of dtype {index.dtype} and column ids of "
                f"dtype {columns.dtype}"
            )
        if values.shape != (len(index), len(columns)):
            size = f"{len(index)} row ids and {len(columns)} column ids"
            raise ValueError(f"values of shape {values.shape}, but {size}")
        if not np.isfinite(values).all():
            raise ValueError("values that are NaN or infinite")
    except MemoryError:
        raise
    except Exception as error:  # If a file is damaged, h5py can raise errors of any type.
        raise ArtifactError(
            f"{path}: the file must be HDF5, and contain a complete frame {key!r} of finite "
            "numbers. The row ids must be all integers or all strings, and so must the column ids. "
            f"Found: {first_line(error)}. Write the frame with `frame.to_hdf(path, "
            f"key={key!r}, format='fixed')`.",
            code="artifacts.frame",
        ) from error
    return values, row_ids, column_ids

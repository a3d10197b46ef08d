"""Write artifacts. A file appears under its final name only when it is complete."""

import contextlib
import json
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from trak_core import __version__
from trak_core.artifacts.format import (
    LIBVER,
    VERSION,
    ArtifactError,
    ArtifactKind,
    add_rows,
    content_hash,
    ids_array,
    new_hash,
    plain_ids,
    put_attributes,
    put_vector,
    scaled_integers,
    scales_of,
    table_columns,
    write_object,
)
from trak_core.runtime.files import atomic_write, disk_full_error

if TYPE_CHECKING:  # At run time, only jobs that write a table import pandas.
    import pandas as pd

_Table = dict[str, np.ndarray]  # the columns of a table, by name
# Where a table's column is stored: its name, the field of the HDF5 table that contains it, and its
# index within the field. pandas stores several columns in one field.
_Column = tuple[str, str, int]
_PIECE_ROWS = 2**18  # rows of a table that pandas writes at a time, which limits its memory
_PANDAS_VERSION = "0.15.2"  # version of pandas' HDF5 layout; pandas 3 does not write this attribute
# The attributes without which PyTables and pandas could not read a matrix.
_FRAME = {
    **{"CLASS": "GROUP", "VERSION": "1.0", "TITLE": "", "pandas_type": "frame"},
    **{"pandas_version": _PANDAS_VERSION, "encoding": "UTF-8", "errors": "strict"},
    **{"ndim": 2, "nblocks": 1, "axis0_variety": "regular", "axis1_variety": "regular"},
    "block0_items_variety": "regular",
}
_VALUES = {"CLASS": "CARRAY", "VERSION": "1.1", "TITLE": "", "FLAVOR": "numpy"}
_AXIS = {"CLASS": "ARRAY", "VERSION": "2.4", "TITLE": "", "FLAVOR": "numpy"}
# The attributes that pandas stores for an axis without a name.
_UNNAMED = {"name": np.bytes_(b"N."), "transposed": np.uint8(1)}


def _even(length: int, most: int) -> int:
    """Return the chunk size for an axis with ``length`` entries, at most ``most``.

    HDF5 pads the last chunk of the axis. If this would add more than 2 %, chunks are made smaller.
    """
    count = -(-length // max(1, most))
    return min(length, most) if count * most <= 1.02 * length else -(-length // max(1, count))


class MatrixWriter:
    """The values of a new matrix. ``values[start:stop] = block`` writes the next rows."""

    def __init__(self, path: Path, dataset: h5py.Dataset) -> None:
        self._path, self._dataset, self._filled = path, dataset, 0
        self.name = str(dataset.name).lstrip("/")
        self._hash = new_hash()
        self.scales = np.zeros(len(dataset), np.float32) if dataset.dtype == np.int8 else None

    def __setitem__(self, rows: slice, values: Any) -> None:
        start, stop, _ = rows.indices(len(self._dataset))
        shape = (stop - start, *self._dataset.shape[1:])
        if start != self._filled:
            raise ValueError(f"row {self._filled} must be written next. Found row {start}.")
        if self.scales is None:
            block = np.broadcast_to(np.asarray(values, self._dataset.dtype), shape)
        else:
            block, scales = scaled_integers(np.broadcast_to(np.asarray(values), shape))
            if not np.isfinite(scales).all():
                error = ValueError(f"{self.name!r} contains NaN, infinity, or too large numbers")
                raise not_finite(self._path, error)
            self.scales[start:stop] = scales
        try:
            add_rows(self._hash, self.name, block)
        except ValueError as error:
            raise not_finite(self._path, error) from error
        self._dataset[start:stop] = block
        self._filled = stop

    def hexdigest(self) -> str:
        """Return the hash of the values. Raise a ``ValueError`` if rows were not written."""
        if self._filled < len(self._dataset):
            raise ValueError(
                f"{self.name!r} must be complete, but only {self._filled} of "
                f"{len(self._dataset)} rows were written"
            )
        return self._hash.hexdigest()


def not_finite(path: Path, error: Exception) -> ArtifactError:
    """Return the error for numbers in an artifact that are NaN or infinite."""
    return ArtifactError(
        f"{path}: every number in the file must be finite, but {error}. The file was not written.",
        code="artifacts.not_finite",
    )


@dataclass(slots=True)
class Writer:
    """Write the content of a new artifact. ``create`` yields an instance."""

    path: Path
    file: h5py.File
    tables: list[tuple[str, _Table, list[str]]] = field(default_factory=list)
    matrices: list[MatrixWriter] = field(default_factory=list)

    def matrix(
        self,
        key: str,
        index: Sequence[Any] | np.ndarray,
        columns: Sequence[Any] | np.ndarray,
        *,
        dtype: Any = np.float32,
        chunks: tuple[int, int] = (256, 2**14),
    ) -> MatrixWriter:
        """Return a writer for the values of a new matrix of shape (len(index), len(columns)).

        ``index`` and ``columns`` are the row and column ids, integers or strings. ``chunks`` is the
        maximum number of rows and of columns in a chunk. If ``dtype`` is int8, rows are quantized
        by ``scaled_integers``.
        """
        group = self.file.create_group(key)
        put_attributes(group, **_FRAME)
        for name, ids in (("axis0", columns), ("axis1", index), ("block0_items", columns)):
            values = ids_array(ids)
            kind = "string" if values.dtype.kind == "S" else "integer"
            put_attributes(put_vector(group, name, values), **_AXIS, kind=kind, **_UNNAMED)
        shape = (len(index), len(columns))
        chunks = (_even(shape[0], chunks[0]), _even(shape[1], chunks[1]))
        # With a cache for two rows of chunks, HDF5 writes each chunk only once.
        cache_bytes = 2 * chunks[0] * max(shape[1], chunks[1]) * np.dtype(dtype).itemsize
        values = group.create_dataset(
            *("block0_values", shape, dtype),
            chunks=chunks,
            fletcher32=True,
            rdcc_nslots=2**14 - 3,
            rdcc_nbytes=cache_bytes,
        )
        put_attributes(values, **_VALUES, transposed=np.uint8(1))
        self.matrices.append(MatrixWriter(self.path, values))
        return self.matrices[-1]

    def vector(self, key: str, values: Sequence[Any] | np.ndarray, *, chunk: int = 2**16) -> None:
        """Write a vector of numbers or ids."""
        array = ids_array(values) if isinstance(values, list) else np.asarray(values)
        put_vector(self.file, key, array, chunk)

    def scalar(self, key: str, value: float) -> None:
        """Write a number in the compact layout, because HDF5 then stores a checksum."""
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        compact.set_obj_track_times(False)
        # ``create_dataset`` would ignore the layout for a scalar.
        number, space = np.asarray(value), h5py.h5s.create(h5py.h5s.SCALAR)
        kind = h5py.h5t.py_create(number.dtype)
        dataset = h5py.h5d.create(self.file.id, key.encode(), kind, space, compact)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, number)

    def table(
        self, key: str, rows: "pd.DataFrame | Mapping[str, np.ndarray]", searchable: Sequence[str]
    ) -> None:
        """Add a table, which ``create`` writes with pandas at the end of the ``with`` block.

        ``rows`` is a frame, or a dict of arrays by column name. Readers can select rows by the
        ``searchable`` columns, with the argument ``where`` of ``pandas.read_hdf``.
        """
        columns = {name: np.asarray(rows[name]) for name in rows}
        if not _length(columns):  # pandas cannot write an empty table
            raise ArtifactError(
                f"{self.path}: the table {key!r} must have at least one row, but has none. Check "
                "whether every score is exactly 0.",
                code="artifacts.no_row",
            )
        self.tables.append((key, columns, list(searchable)))


def _length(rows: _Table) -> int:
    return len(next(iter(rows.values())))


def _pieces(rows: _Table) -> Iterator["pd.DataFrame"]:
    """Yield the rows of a table as frames of limited size."""
    import pandas as pd

    for start in range(0, _length(rows), _PIECE_ROWS):
        parts = {name: values[start : start + _PIECE_ROWS] for name, values in rows.items()}
        texts = {name: plain_ids(part) for name, part in parts.items() if part.dtype.kind == "S"}
        yield pd.DataFrame(parts | texts, index=pd.RangeIndex(start, start + _length(parts)))


def _widths(rows: _Table, searchable: list[str]) -> dict[str, int]:
    """Return the size in bytes of the longest text in each field of a table.

    pandas needs these sizes if a table is written in several pieces, because it creates the fields
    for the first piece.
    """
    widths: dict[str, int] = {}
    for name, values in rows.items():
        if values.dtype.kind in "OSTU":
            field_name = name if name in searchable else "values"
            width = max((len(str(v).encode()) for v in values), default=1)
            width = values.dtype.itemsize if values.dtype.kind == "S" else width
            widths[field_name] = max(widths.get(field_name, 1), width)
    return widths


def _put_table(path: Path, key: str, rows: _Table, searchable: list[str]) -> list[_Column]:
    """Return the position of each column in a stored table, after writing the table with pandas.

    pandas also stores the positions, but as a pickle. ``Artifact`` does not load pickles, because
    they could run code.
    """
    import pandas as pd

    # pandas writes checksums only if a compression library is named. Level 0 does not compress.
    packing: Any = {"track_times": False, "complib": "zlib", "complevel": 0}
    # pandas 2 reads a text that equals nan_rep as a missing value. The default is "nan", which may
    # be a real text, unlike this control character.
    packing["nan_rep"] = "\x1a"
    if _length(rows) > _PIECE_ROWS:
        packing["min_itemsize"] = _widths(rows, searchable)
    with pd.HDFStore(path, "a", fletcher32=True) as store:
        for piece in _pieces(rows):
            options = {"data_columns": searchable, "index": False, **packing}
            store.put(key, piece, format="table", append=True, **options)
        # pandas 3 does not write this attribute, but pandas 2 needs it to read a table.
        group: Any = store.get_node(key)
        group._v_attrs.pandas_version = _PANDAS_VERSION
        table: Any = store.get_node(f"{key}/table")
        names = {field: table.attrs[f"{field}_kind"] for field in table.colnames[1:]}
    positions = {name: (f, i) for f, columns in names.items() for i, name in enumerate(columns)}
    return [(name, *positions[name]) for name in rows]


def _reads_back(path: Path, key: str, rows: _Table, columns: list[_Column]) -> bool:
    """Return whether a stored table equals ``rows``.

    This must be tested, because PyTables reports no error if it fails to write, as on a full disk.
    """
    try:
        with h5py.File(path, locking=False) as file:
            table: Any = file[f"{key}/table"]
            is_same = len(table) == _length(rows)
            for piece in _pieces(rows):
                first = int(piece.index[0])
                values = table_columns(table, columns, slice(first, first + len(piece)))
                for name in piece:
                    equal_nan = piece[name].dtype.kind == "f"
                    is_same &= np.array_equal(values[name], piece[name], equal_nan=equal_nan)
            return is_same
    except Exception:  # If a file is incomplete, h5py can raise errors of any type.
        return False


@contextlib.contextmanager
def create(
    path: Path,
    kind: ArtifactKind,
    spec: Mapping[str, Any],
    provenance: Mapping[str, Any],
    **attributes: Any,
) -> Generator[Writer, None, None]:
    """Yield the writer of an artifact, for a ``with`` block.

    The file appears under ``path`` only when it is complete. If an exception is raised, for example
    because the disk is full or a value is not finite, the temporary file is deleted and ``path``
    does not change. ``open_artifact`` shows an example.

    Args:
        path: The final name of the file. Its folder is created if it does not exist.
        kind: The kind of the file.
        spec: All settings that determine the content, as plain values. Lists may have any length.
            All other values together must fit into an attribute, which is limited to 64 KiB.
        provenance: The software and the device that compute the content. It must not contain the
            time, so that repeated runs write equal bytes.
        attributes: Other attributes of the file.
    """
    with atomic_write(path) as partial:
        # The temporary file is not locked, because no other process uses it, and some file systems
        # do not support locks.
        with h5py.File(partial, "w", libver=LIBVER, locking=False) as file:
            own = {"encoding-type": kind.encoding_type, "encoding-version": VERSION}
            put_attributes(file, **own, **attributes)
            write_object(file, "spec", spec)
            write_object(file, "provenance", provenance)
            writer = Writer(path, file)
            # An exception in the caller's block must skip the rest, which completes the file.
            yield writer  # ruff: ignore[fallible-context-manager]
            known: dict[str, str] = {}
            for matrix in writer.matrices:
                known[matrix.name] = matrix.hexdigest()
                if matrix.scales is not None:
                    # With small chunks, reading a few rows also reads only a few scales.
                    writer.vector(scales_of(matrix.name.split("/")[0]), matrix.scales, chunk=1024)
            for key, _, _ in writer.tables:
                # A group that PyTables creates would contain the time of its creation.
                file.create_group(key)
        # PyTables uses its own copy of the HDF5 library, so h5py must have closed the file.
        fields: dict[str, list[_Column]] = {}
        for key, rows, searchable in writer.tables:
            fields[key] = _put_table(partial, key, rows, searchable)
            if not _reads_back(partial, key, rows, fields[key]):
                raise disk_full_error(path, f"the table {key} differs from what was written")
        with h5py.File(partial, "r+", locking=False) as file:
            for key, columns in fields.items():
                put_attributes(file.require_group(key), columns=json.dumps(columns))
            try:
                put_attributes(file, **{"content-hash": content_hash(file, known)})
            except ValueError as error:
                raise not_finite(path, error) from error


_version = cache(version)  # Reading the metadata of a package takes 10 ms.


def software(
    code: str, device: str, *packages: str, made_from: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return the provenance of an artifact: the software and device that compute it.

    ``code`` is a digest of the code, and ``packages`` are the packages whose versions may affect
    the numbers. ``made_from`` contains the provenance of each input file. If several files have the
    same provenance, it is returned only once.
    """
    own = {
        "trak-core": __version__,
        "python": platform.python_version(),
        "code": code,
        "device": device,
        **{package: _version(package) for package in packages},
    }
    different = [source for i, source in enumerate(made_from) if source not in made_from[:i]]
    return own | {"made_from": different} if different else own

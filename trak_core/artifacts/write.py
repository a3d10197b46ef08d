"""Write artifacts, whole under their final names or not at all, and say what made them."""

import contextlib
import json
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import h5py
import numpy as np

from trak_core import __version__
from trak_core.artifacts.format import (
    LIBVER,
    VERSION,
    ArtifactError,
    ArtifactKind,
    ValuesHash,
    content_hash,
    ids_array,
    plain_ids,
    put_attributes,
    put_vector,
    scaled_integers,
    scales_of,
    table_columns,
    write_object,
)
from trak_core.system.files import does_not_fit, written_whole

if TYPE_CHECKING:  # most jobs write no table
    import pandas as pd

_Place = tuple[str, str, int]
# Columns of a table: pandas' own, or stored ones by name.
Table = Union["pd.DataFrame", Mapping[str, np.ndarray]]
# Rows of a table that pandas has at a time, in more memory than they take.
_PIECE_ROWS = 2**18
_PANDAS_VERSION = "0.15.2"  # of pandas' HDF5 layout; pandas 3 no longer writes it
# What PyTables and pandas look for, in the order in which files have it.
_FRAME = {
    **{"CLASS": "GROUP", "VERSION": "1.0", "TITLE": "", "pandas_type": "frame"},
    **{"pandas_version": _PANDAS_VERSION, "encoding": "UTF-8", "errors": "strict"},
    **{"ndim": 2, "nblocks": 1, "axis0_variety": "regular", "axis1_variety": "regular"},
    "block0_items_variety": "regular",
}
_VALUES = {"CLASS": "CARRAY", "VERSION": "1.1", "TITLE": "", "FLAVOR": "numpy"}
_AXIS = {"CLASS": "ARRAY", "VERSION": "2.4", "TITLE": "", "FLAVOR": "numpy"}


def _axis(group: h5py.Group, name: str, ids: Sequence[Any] | np.ndarray) -> None:
    values = ids_array(ids)
    dataset = put_vector(group, name, values)
    kind = "string" if values.dtype.kind == "S" else "integer"
    # pandas' own spelling of "the axis has no name".
    put_attributes(dataset, **_AXIS, kind=kind, name=np.bytes_(b"N."), transposed=np.uint8(1))


def _even(length: int, most: int) -> int:
    """Return the length of chunks of at most ``most``: HDF5 stores the last one as a whole.

    Where that is little it is ``most``, since readers' blocks of rows end with such chunks.
    """
    count = -(-length // max(1, most))
    return min(length, most) if count * most <= 1.02 * length else -(-length // max(1, count))


class MatrixWriter:
    """A new frame's values, to fill by blocks of rows from the top down: ``values[a:b] = block``.

    HDF5 keeps chunks that are not full yet: whatever the blocks, each is written once.
    """

    def __init__(self, path: Path, dataset: h5py.Dataset) -> None:
        """Fill a dataset of the artifact that will lie at ``path``."""
        self._path, self._dataset, self._filled = path, dataset, 0
        self.name = str(dataset.name).lstrip("/")
        self._hash = ValuesHash(self.name)
        self.scales = np.zeros(len(dataset), np.float32) if dataset.dtype == np.int8 else None

    def __setitem__(self, rows: slice, values: Any) -> None:
        """Write some rows."""
        start, stop, _ = rows.indices(len(self._dataset))
        shape = (stop - start, *self._dataset.shape[1:])
        if start != self._filled:
            raise ValueError(f"rows come from the top down: {self._filled} are filled, not {start}")
        if self.scales is None:
            block = np.broadcast_to(np.asarray(values, self._dataset.dtype), shape)
        else:
            block, scales = scaled_integers(np.broadcast_to(np.asarray(values), shape))
            if not np.isfinite(scales).all():
                raise not_finite(self._path, ValueError(f"{self.name!r} is not"))
            self.scales[start:stop] = scales
        try:
            self._hash.add(block)
        except ValueError as error:
            raise not_finite(self._path, error) from error
        self._dataset[start:stop] = block
        self._filled = stop

    def hexdigest(self) -> str:
        """Return the hash of the values, which must all be there: HDF5 would fill in zeros."""
        if self._filled < len(self._dataset):
            raise ValueError(
                f"{self.name!r} is filled to row {self._filled} of {len(self._dataset)}"
            )
        return self._hash.hexdigest()


def not_finite(path: Path, error: Exception) -> ArtifactError:
    """Return the error of a file whose numbers are not what an artifact has."""
    return ArtifactError(
        f"{path}: every number of an artifact must be finite, but {error}. Nothing was written."
    )


@dataclass(slots=True)
class Writer:
    """An artifact being written; see ``create``."""

    path: Path
    file: h5py.File
    tables: list[tuple[str, "Table", list[str]]] = field(default_factory=list)
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
        """Return a new frame's values, shape (len(index), len(columns)), to fill by blocks.

        Row ids (``index``) and column ids are integers or strings. A chunk has so many rows and
        columns at most. With the dtype int8 each row is divided by a scale of its own
        (``scaled_integers``), which a vector beside the frame keeps.
        """
        group = self.file.create_group(key)
        put_attributes(group, **_FRAME)
        for name, ids in (("axis0", columns), ("axis1", index), ("block0_items", columns)):
            _axis(group, name, ids)
        shape = (len(index), len(columns))
        chunks = (_even(shape[0], chunks[0]), _even(shape[1], chunks[1]))
        # A row of chunks, and the slots with which HDF5 finds each of them.
        cache = {"rdcc_nbytes": 2 * chunks[0] * max(shape[1], chunks[1]) * np.dtype(dtype).itemsize}
        values = group.create_dataset(
            "block0_values",
            shape,
            dtype,
            chunks=chunks,
            fletcher32=True,
            rdcc_nslots=2**14 - 3,
            **cache,
        )
        put_attributes(values, **_VALUES, transposed=np.uint8(1))
        self.matrices.append(MatrixWriter(self.path, values))
        return self.matrices[-1]

    def vector(self, key: str, values: Sequence[Any] | np.ndarray, *, chunk: int = 2**16) -> None:
        """Write one value a sample, or ids."""
        array = ids_array(values) if isinstance(values, list) else np.asarray(values)
        put_vector(self.file, key, array, chunk)

    def scalar(self, key: str, value: float) -> None:
        """Write one number, among the metadata: a single value has no chunks to check."""
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        compact.set_obj_track_times(False)
        number, space = np.asarray(value), h5py.h5s.create(h5py.h5s.SCALAR)
        kind = h5py.h5t.py_create(number.dtype)
        dataset = h5py.h5d.create(self.file.id, key.encode(), kind, space, compact)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, number)

    def table(self, key: str, rows: "Table", searchable: Sequence[str]) -> None:
        """Write a table by pandas itself; ``where=`` can name the ``searchable`` columns.

        Columns may be stored ones, by name: pandas then has a piece of the rows at a time.
        """
        if not _length(rows):  # pandas would not write it
            raise ArtifactError(
                f"{self.path}: the table {key!r} must have a row. Found none: is every "
                "score exactly 0?"
            )
        self.tables.append((key, rows, list(searchable)))


def _length(rows: Table) -> int:
    return len(next(iter(rows.values()))) if isinstance(rows, Mapping) else len(rows)


def _pieces(rows: Table) -> Iterator["pd.DataFrame"]:
    """Yield the rows of a table, so many at a time as pandas writes at once."""
    import pandas as pd

    for start in range(0, _length(rows), _PIECE_ROWS):
        stop = min(start + _PIECE_ROWS, _length(rows))
        # Arrays, because pandas would look for the rows of a frame by their labels.
        parts = {name: np.asarray(rows[name][start:stop]) for name in rows}
        columns = {
            n: plain_ids(part) if part.dtype.kind == "S" else part for n, part in parts.items()
        }
        yield pd.DataFrame(columns, index=pd.RangeIndex(start, stop))


def _widths(rows: Table, searchable: list[str]) -> dict[str, int]:
    """Return the bytes of each text column, or of a block of them, in the whole table."""
    widths: dict[str, int] = {}
    for name in rows:
        values = np.asarray(rows[name])
        if values.dtype.kind in "OSTU":
            where = name if name in searchable else "values"
            width = max((len(str(v).encode()) for v in values), default=1)
            width = values.dtype.itemsize if values.dtype.kind == "S" else width
            widths[where] = max(widths.get(where, 1), width)
    return widths


def _put_table(path: Path, key: str, rows: Table, searchable: list[str]) -> list[_Place]:
    """Return name, field and place of each column in a table that pandas writes here.

    pandas keeps that as a pickle, which a reader must not open.
    """
    import pandas as pd

    # No compression: pandas passes checksums on only where one is named.
    packing: Any = {"track_times": False, "complib": "zlib", "complevel": 0}
    # pandas 2 reads back what equals it as missing: not a text, nor an id, has one.
    packing["nan_rep"] = "\x1a"
    if _length(rows) > _PIECE_ROWS:
        packing["min_itemsize"] = _widths(rows, searchable)
    with pd.HDFStore(path, "a", fletcher32=True) as store:
        for piece in _pieces(rows):
            given = {"data_columns": searchable, "index": False, **packing}
            store.put(key, piece, format="table", append=True, **given)
        # pandas 2 reads no table without it.
        group: Any = store.get_node(key)
        group._v_attrs.pandas_version = _PANDAS_VERSION
        table: Any = store.get_node(f"{key}/table")
        names = {field: table.attrs[f"{field}_kind"] for field in table.colnames[1:]}
    places = {name: (field, i) for field, held in names.items() for i, name in enumerate(held)}
    return [(name, *places[name]) for name in rows]


def _reads_back(path: Path, key: str, rows: Table, columns: list[_Place]) -> bool:
    """Say whether a table reads as it was written: PyTables hides failed writes."""
    try:
        with h5py.File(path, locking=False) as file:
            table: Any = file[f"{key}/table"]
            if len(table) != _length(rows):
                return False
            for piece in _pieces(rows):
                first = int(piece.index[0])
                values = table_columns(table, columns, slice(first, first + len(piece)))
                if not all(
                    np.array_equal(
                        values[name], piece[name], equal_nan=piece[name].dtype.kind == "f"
                    )
                    for name in piece
                ):
                    return False
        return True
    except Exception:  # of many kinds, where the file breaks off
        return False


@contextlib.contextmanager
def create(
    path: Path,
    kind: ArtifactKind,
    spec: Mapping[str, Any],
    provenance: Mapping[str, Any],
    **attributes: Any,
) -> Generator[Writer, None, None]:
    """Yield the writer of an artifact, which appears complete under ``path``, or not at all.

    The folder is made. On an exception the temporary file goes and ``path`` stays as it was. So it
    does if a value is not finite, or the disk takes no more. See ``open_artifact`` for an example.

    ``spec`` is everything that decides the numbers, as plain values. Its lists may have any length;
    the other values together must fit an attribute (64 KiB). ``provenance`` is software and device;
    without clock times a repeated run is byte-identical. ``attributes`` are more root attributes.
    """
    with written_whole(path) as partial:
        # A temporary file needs no lock, which some disks don't know.
        with h5py.File(partial, "w", libver=LIBVER, locking=False) as file:
            own = {"encoding-type": kind.encoding_type, "encoding-version": VERSION}
            put_attributes(file, **own, **attributes)
            write_object(file, "spec", spec)
            write_object(file, "provenance", provenance)
            writer = Writer(path, file)
            # What fails is not finished.
            yield writer  # ruff: ignore[fallible-context-manager]
            known: dict[str, str] = {}
            for matrix in writer.matrices:
                known[matrix.name] = matrix.hexdigest()
                if matrix.scales is not None:
                    # Read with rows of the frame, a chunk of them at a time.
                    writer.vector(scales_of(matrix.name.split("/")[0]), matrix.scales, chunk=1024)
            for key, _, _ in writer.tables:
                file.create_group(key)  # those of PyTables have the time in them
        # One library at a time: PyTables, under pandas, brings an HDF5 of its own.
        fields: dict[str, list[_Place]] = {}
        for key, rows, searchable in writer.tables:
            fields[key] = _put_table(partial, key, rows, searchable)
            if not _reads_back(partial, key, rows, fields[key]):
                raise does_not_fit(path, f"the table {key} does not read as it was written")
        with h5py.File(partial, "r+", locking=False) as file:
            for key, columns in fields.items():
                put_attributes(file.require_group(key), columns=json.dumps(columns))
            try:
                put_attributes(file, **{"content-hash": content_hash(file, known)})
            except ValueError as error:
                raise not_finite(path, error) from error


# The files that have it are read and parsed, 10 ms each.
_version = cache(version)


def software(
    code: str, device: str, *packages: str, made_from: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return versions, code digest and device as plain values: an artifact's provenance.

    The device is ``cpu``, or ``cuda`` and its name. Packages are distributions that the numbers
    depend on. ``made_from`` is the provenance of files that went in; equal ones are kept once.
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

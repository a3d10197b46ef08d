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
    VERSION,
    ArtifactError,
    ArtifactKind,
    ValuesHash,
    content_hash,
    ids_array,
    plain_ids,
    put_attributes,
    scaled_integers,
    scales_of,
    table_columns,
    write_object,
)
from trak_core.artifacts.sealed_file import SealingFile
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
    dataset = group.create_dataset(name, data=values, fletcher32=True, chunks=values.shape)
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
    """A new frame's values, to fill by blocks of rows: ``values[start:stop] = block``.

    Whoever fills them from the top down writes whole chunks, whatever the blocks, and nothing is
    read back.
    """

    def __init__(self, path: Path, dataset: h5py.Dataset, raw: SealingFile) -> None:
        """Fill a dataset of the artifact that will lie at ``path``."""
        self._path, self._dataset, self._raw = path, dataset, raw
        self._hash = ValuesHash(str(dataset.name).lstrip("/"))
        self._chunk_rows: int = dataset.chunks[0]  # pyright: ignore[reportOptionalSubscript]
        self._filled, self._rest = 0, np.empty((0, *dataset.shape[1:]), dataset.dtype)
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
                name = str(self._dataset.name).lstrip("/")
                raise not_finite(self._path, ValueError(f"{name!r} is not"))
            self.scales[start:stop] = scales
        try:
            self._hash.add(block)
        except ValueError as error:
            raise not_finite(self._path, error) from error
        self._filled = stop
        size = self._chunk_rows
        if len(self._rest):
            missing = size - len(self._rest)
            self._rest, block = np.concatenate([self._rest, block[:missing]]), block[missing:]
            if len(self._rest) == size or stop == len(self._dataset):
                self._write(stop - len(block) - len(self._rest), self._rest)
                self._rest = self._rest[:0]
        if not len(self._rest):
            whole = len(block) if stop == len(self._dataset) else len(block) // size * size
            self._write(stop - len(block), block[:whole])
            self._rest = block[whole:].copy()

    def _write(self, start: int, block: np.ndarray) -> None:
        if len(block):
            self._dataset[start : start + len(block)] = block
        if self._raw.failure is not None:
            raise self._raw.failure

    @property
    def key(self) -> str:
        """The frame's name."""
        return str(self._dataset.parent.name).lstrip("/")

    @property
    def known(self) -> dict[str, str]:
        """The hash of the values by their name, if all are there."""
        is_whole = self._filled == len(self._dataset)
        return {str(self._dataset.name).lstrip("/"): self._hash.hexdigest()} if is_whole else {}


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
    raw: SealingFile
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
        values = group.create_dataset(
            "block0_values", shape=shape, dtype=dtype, chunks=chunks, fletcher32=True
        )
        put_attributes(values, **_VALUES, transposed=np.uint8(1))
        self.matrices.append(MatrixWriter(self.path, values, self.raw))
        return self.matrices[-1]

    def vector(self, key: str, values: Sequence[Any] | np.ndarray, *, chunk: int = 2**16) -> None:
        """Write one value a sample, or ids."""
        array = ids_array(values) if isinstance(values, list) else np.asarray(values)
        chunks = (min(len(array), chunk),)
        # Nothing at all has no chunks.
        stored: dict[str, Any] = {"chunks": chunks, "fletcher32": True} if len(array) else {}
        self.file.create_dataset(key, data=array, **stored)

    def scalar(self, key: str, value: float) -> None:
        """Write one number."""
        self.file.create_dataset(key, data=value)

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
        place = slice(start, start + _PIECE_ROWS)
        if isinstance(rows, Mapping):
            columns = {
                name: plain_ids(values[place]) if values.dtype.kind == "S" else values[place]
                for name, values in rows.items()
            }
            size = len(next(iter(columns.values())))
            yield pd.DataFrame(columns, index=pd.RangeIndex(start, start + size))
        else:
            yield rows.iloc[place]


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
            store.put(key, piece, format="table", append=key in store, **given)
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
        known: dict[str, str] = {}
        with SealingFile(partial, "w+") as raw:
            with _hdf5(raw, "w") as file:
                own = {"encoding-type": kind.encoding_type, "encoding-version": VERSION}
                put_attributes(file, **own, **attributes)
                write_object(file, "spec", spec)
                write_object(file, "provenance", provenance)
                writer = Writer(path, file, raw)
                # What fails is not finished.
                yield writer  # ruff: ignore[fallible-context-manager]
                for matrix in writer.matrices:
                    known |= matrix.known
                    if matrix.scales is not None:
                        # Read with rows of the frame, a chunk of them at a time.
                        writer.vector(scales_of(matrix.key), matrix.scales, chunk=1024)
                if not writer.tables:
                    _put_content_hash(path, file, known)
            if not writer.tables:
                raw.finish()
        if writer.tables:
            _add_tables(path, partial, writer, known)


def _add_tables(path: Path, partial: Path, writer: Writer, known: dict[str, str]) -> None:
    """Write the tables, the content hash and the seal."""
    # One library at a time: PyTables, under pandas, brings an HDF5 of its own.
    fields = {key: _put_table(partial, key, rows, s) for key, rows, s in writer.tables}
    for key, rows, _ in writer.tables:
        if not _reads_back(partial, key, rows, fields[key]):
            raise does_not_fit(path, f"the table {key} does not read as it was written")
    with SealingFile(partial, "r+") as raw:
        with _hdf5(raw, "r+") as file:
            for key, columns in fields.items():
                put_attributes(file.require_group(key), columns=json.dumps(columns))
            _put_content_hash(path, file, known)
        raw.finish()


@contextlib.contextmanager
def _hdf5(raw: SealingFile, mode: str) -> Generator[h5py.File, None, None]:
    """Give HDF5's file of these bytes; what the disk said of a write is the error."""
    try:
        # Chunks are written whole: without a cache their order is theirs, whatever the blocks.
        with h5py.File(raw, mode, rdcc_nbytes=0) as file:
            yield file
    except Exception as error:
        if raw.failure is None or error is raw.failure:
            raise
        raise raw.failure from error


def _put_content_hash(path: Path, file: h5py.File, known: dict[str, str]) -> None:
    file.flush()
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

"""Write artifacts: whole under their final names, or not at all."""

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from trak_core.artifacts.format import (
    VERSION,
    ArtifactError,
    ArtifactKind,
    content_hash,
    ids_array,
    put_attributes,
    seal,
    table_columns,
    write_object,
)
from trak_core.system.files import does_not_fit, written_whole

if TYPE_CHECKING:  # most jobs write no table
    import pandas as pd

_Place = tuple[str, str, int]
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


def _axis(group: h5py.Group, name: str, ids: Sequence[Any]) -> None:
    values = ids_array(ids)
    dataset = group.create_dataset(name, data=values, fletcher32=True, chunks=values.shape)
    kind = "string" if values.dtype.kind == "S" else "integer"
    # pandas' own spelling of "the axis has no name".
    put_attributes(dataset, **_AXIS, kind=kind, name=np.bytes_(b"N."), transposed=np.uint8(1))


def _even(length: int, most: int) -> int:
    """Return the length of chunks of at most ``most``: HDF5 stores the last one as a whole."""
    return -(-length // max(1, -(-length // most)))


@dataclass(slots=True)
class Writer:
    """An artifact being written; see ``create``."""

    file: h5py.File
    tables: list[tuple[str, "pd.DataFrame", list[str]]] = field(default_factory=list)

    def matrix(
        self,
        key: str,
        index: Sequence[Any],
        columns: Sequence[Any],
        *,
        dtype: Any = np.float32,
        chunks: tuple[int, int] = (256, 2**14),
    ) -> h5py.Dataset:
        """Return a new frame's values, shape (len(index), len(columns)), to fill by blocks.

        Row ids (``index``) and column ids are integers or strings. A chunk has so many rows and
        columns at most.
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
        return values

    def vector(self, key: str, values: Sequence[Any] | np.ndarray) -> None:
        """Write one value a sample, or ids."""
        array = ids_array(values) if isinstance(values, list) else np.asarray(values)
        chunks = (min(len(array), 2**16),)
        self.file.create_dataset(key, data=array, chunks=chunks, fletcher32=True)

    def scalar(self, key: str, value: float) -> None:
        """Write one number."""
        self.file.create_dataset(key, data=value)

    def table(self, key: str, rows: "pd.DataFrame", searchable: Sequence[str]) -> None:
        """Write a small table by pandas itself; ``where=`` can name the ``searchable`` columns."""
        if rows.empty:  # pandas would not write it
            raise ArtifactError(
                f"{self.file.filename}: the table {key!r} must have a row. Found none: is every "
                "score exactly 0?"
            )
        self.tables.append((key, rows, list(searchable)))


def _put_table(path: Path, key: str, rows: "pd.DataFrame", searchable: list[str]) -> list[_Place]:
    """Return name, field and place of each column in a table that pandas writes here.

    pandas keeps that as a pickle, which a reader must not open.
    """
    import pandas as pd

    # No compression: pandas passes checksums on only where one is named.
    packing: Any = {"track_times": False, "complib": "zlib", "complevel": 0}
    # pandas 2 reads back what equals it as missing: not a text, nor an id, has one.
    packing["nan_rep"] = "\x1a"
    with pd.HDFStore(path, "a", fletcher32=True) as store:
        store.put(key, rows, format="table", data_columns=searchable, index=False, **packing)
        # pandas 2 reads no table without it.
        group: Any = store.get_node(key)
        group._v_attrs.pandas_version = _PANDAS_VERSION
        table: Any = store.get_node(f"{key}/table")
        names = {field: table.attrs[f"{field}_kind"] for field in table.colnames[1:]}
    places = {name: (field, i) for field, held in names.items() for i, name in enumerate(held)}
    return [(name, *places[name]) for name in rows.columns]


def _reads_back(path: Path, key: str, rows: "pd.DataFrame", columns: list[_Place]) -> bool:
    """Say whether a table reads as it was written: PyTables hides failed writes."""
    try:
        with h5py.File(path) as file:
            table: Any = file[f"{key}/table"]
            values = table_columns(table, columns)
        return all(
            np.array_equal(values[name], rows[name], equal_nan=rows[name].dtype.kind == "f")
            for name in rows
        )
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
        with h5py.File(partial, "w") as file:
            own = {"encoding-type": kind.encoding_type, "encoding-version": VERSION}
            put_attributes(file, **own, **attributes)
            write_object(file, "spec", spec)
            write_object(file, "provenance", provenance)
            writer = Writer(file)
            yield writer
        # One library at a time: PyTables, under pandas, brings an HDF5 of its own.
        fields = {key: _put_table(partial, key, rows, s) for key, rows, s in writer.tables}
        for key, rows, _ in writer.tables:
            if not _reads_back(partial, key, rows, fields[key]):
                raise does_not_fit(path, f"the table {key} does not read as it was written")
        with h5py.File(partial, "r+") as file:
            for key, columns in fields.items():
                put_attributes(file.require_group(key), columns=json.dumps(columns))
            try:
                put_attributes(file, **{"content-hash": content_hash(file)})
            except ValueError as error:
                raise ArtifactError(
                    f"{path}: every number of an artifact must be finite, but {error}. "
                    "Nothing was written."
                ) from error
        seal(partial)

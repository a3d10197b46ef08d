"""Writing an artifact: whole under its final name, or not at all."""

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from trak_core.artifacts._format import (
    VERSION,
    ArtifactError,
    Kind,
    content_hash,
    ids_array,
    table_columns,
)
from trak_core.artifacts._objects import write_object
from trak_core.artifacts._seal import seal
from trak_core.system.files import does_not_fit, written_whole

if TYPE_CHECKING:  # most jobs write no table
    import pandas as pd

_Place = tuple[str, str, int]
_PANDAS_VERSION = "0.15.2"  # of pandas' HDF5 layout; pandas 3 no longer writes it


def _text(value: str) -> tuple[np.bytes_, np.dtype]:
    # PyTables reads its own attributes only as UTF-8 of a fixed length.
    encoded = value.encode()
    return np.bytes_(encoded), h5py.string_dtype("utf-8", max(1, len(encoded)))


def _put_attributes(node: h5py.Group | h5py.Dataset, **attributes: Any) -> None:
    for name, value in attributes.items():
        if isinstance(value, str):
            data, dtype = _text(value)
            node.attrs.create(name, data, dtype=dtype)
        else:
            node.attrs[name] = value


def _axis(group: h5py.Group, name: str, ids: Sequence[Any]) -> None:
    values = ids_array(ids)
    dataset = group.create_dataset(name, data=values, fletcher32=True, chunks=values.shape)
    _put_attributes(
        dataset,
        CLASS="ARRAY",
        VERSION="2.4",
        TITLE="",
        FLAVOR="numpy",
        kind="string" if values.dtype.kind == "S" else "integer",
        name=np.bytes_(b"N."),  # pandas' own spelling of "the axis has no name"
        transposed=np.uint8(1),
    )


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
        """Make a frame and return its values, to be filled by blocks.

        Args:
            key: Name of the frame.
            index: Row ids, integers or strings.
            columns: Column ids, likewise.
            dtype: Of the values.
            chunks: Rows and columns of a chunk at most.

        Returns:
            A dataset of shape (len(index), len(columns)).
        """
        group = self.file.create_group(key)
        _put_attributes(
            group,
            CLASS="GROUP",
            VERSION="1.0",
            TITLE="",
            pandas_type="frame",
            pandas_version=_PANDAS_VERSION,
            encoding="UTF-8",
            errors="strict",
            ndim=2,
            nblocks=1,
            axis0_variety="regular",
            axis1_variety="regular",
            block0_items_variety="regular",
        )
        for name, ids in (("axis0", columns), ("axis1", index), ("block0_items", columns)):
            _axis(group, name, ids)
        shape = (len(index), len(columns))
        values = group.create_dataset(
            "block0_values",
            shape=shape,
            dtype=dtype,
            chunks=(min(shape[0], chunks[0]), min(shape[1], chunks[1])),
            fletcher32=True,
        )
        _put_attributes(
            values, CLASS="CARRAY", VERSION="1.1", TITLE="", FLAVOR="numpy", transposed=np.uint8(1)
        )
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
        """Write a small table by pandas itself; ``where=`` can name the ``searchable`` columns.

        Raises:
            ArtifactError: If it has no rows, which pandas would not write.
        """
        if rows.empty:
            raise ArtifactError(
                f"{self.file.filename}: the table {key!r} must have a row. Found none: is every "
                "score exactly 0?"
            )
        self.tables.append((key, rows, list(searchable)))


def _put_table(path: Path, key: str, rows: "pd.DataFrame", searchable: list[str]) -> list[_Place]:
    """Write a table by pandas.

    Returns:
        Where each column lies: its name, field and place there. pandas keeps that as a pickle,
        which a reader must not open.
    """
    # No compression: pandas passes checksums on only where one is named.
    import pandas as pd

    with pd.HDFStore(path, "a", fletcher32=True) as store:
        store.put(
            key,
            rows,
            format="table",
            data_columns=searchable,
            # pandas 2 reads back what equals it as missing: not a text, nor an id, has one.
            nan_rep="\x1a",
            index=False,
            track_times=False,
            complib="zlib",
            complevel=0,
        )
        # pandas 2 reads no table without it.
        group: Any = store.get_node(key)
        group._v_attrs.pandas_version = _PANDAS_VERSION
        table: Any = store.get_node(f"{key}/table")
        names = {field: table.attrs[f"{field}_kind"] for field in table.colnames[1:]}
    places = {name: (field, i) for field, held in names.items() for i, name in enumerate(held)}
    return [(name, *places[name]) for name in rows.columns]


def _same(found: Any, written: np.ndarray) -> bool:
    return np.array_equal(found, written, equal_nan=written.dtype.kind == "f")


def _reads_back(path: Path, key: str, rows: "pd.DataFrame", columns: list[_Place]) -> bool:
    """Say whether a table reads as it was written: PyTables hides failed writes."""
    try:
        with h5py.File(path) as file:
            table: Any = file[f"{key}/table"]
            found = table_columns(table, columns)
        return all(_same(found[name], rows[name].to_numpy()) for name in rows)
    except Exception:  # of many kinds, where the file breaks off
        return False


@contextlib.contextmanager
def create(
    path: Path,
    kind: Kind,
    spec: Mapping[str, Any],
    provenance: Mapping[str, Any],
    **attributes: Any,
) -> Generator[Writer, None, None]:
    """Write one artifact: the file appears complete under ``path``, or not at all.

    Args:
        path: Final name; its folder is made.
        kind: What it is.
        spec: Everything that decides the numbers, as plain values. Its lists may grow with the
            study; what else it holds must fit an attribute (64 KiB).
        provenance: Software and device; no clock times, so that a repeated run is byte-identical.
        **attributes: More root attributes.

    Yields:
        The writer. On an exception the temporary file goes and ``path`` stays as it was.

    Raises:
        ArtifactError: If a value written is not finite.
        InputError: If the disk takes no more.
    """
    with written_whole(path) as partial:
        with h5py.File(partial, "w") as file:
            _put_attributes(
                file,
                **{"encoding-type": kind.encoding_type, "encoding-version": VERSION},
                **attributes,
            )
            write_object(file, "spec", spec, _put_attributes)
            write_object(file, "provenance", provenance, _put_attributes)
            writer = Writer(file)
            yield writer
        # One library at a time: PyTables, under pandas, brings an HDF5 of its own.
        fields = {key: _put_table(partial, key, rows, s) for key, rows, s in writer.tables}
        for key, rows, _ in writer.tables:
            if not _reads_back(partial, key, rows, fields[key]):
                raise does_not_fit(path, f"the table {key} does not read as it was written")
        with h5py.File(partial, "r+") as file:
            for key, columns in fields.items():
                _put_attributes(file.require_group(key), columns=json.dumps(columns))
            try:
                _put_attributes(file, **{"content-hash": content_hash(file)})
            except ValueError as error:
                raise ArtifactError(
                    f"{path}: every number of an artifact must be finite, but {error}. "
                    "Nothing was written."
                ) from error
        seal(partial)

"""HDF5 artifacts, format 1: how every file is written, and what a reader makes sure of.

A file is complete under its final name or it is not there. It carries what decided its numbers
(``spec``), what made it (``provenance``) and a hash of its content. Matrices lie in pandas' own
*fixed* frame layout, so that ``pandas.read_hdf(path, key)`` gives a labelled frame and h5py sees an
ordinary chunked dataset, ``<key>/block0_values``; they are written block by block.
"""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd

from trak_core.errors import InputError

VERSION = 1
_HASH_BLOCK_BYTES = 2**24
# What each kind of file must hold, and the rule that makes it.
_KINDS = {
    "trak-features": (("features", "outputs", "sample_ids"), "compute_features"),
    "trak-features-shard": (("features", "outputs", "sample_ids"), "compute_feature_shard"),
    "trak-normal-matrix": (("normal_matrix", "mean_squared_norm"), "compute_normal_matrix"),
    "trak-checkpoint-scores": (("loss_weights",), "compute_scores"),
    "trak-scores": (("top_influences", "targets", "train"), "average_scores"),
}


class ArtifactError(InputError):
    """A file is not the artifact that its reader needs."""


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


def _ids_array(ids: Sequence[Any]) -> np.ndarray:
    if all(isinstance(i, str) for i in ids):
        return np.array([i.encode() for i in ids], dtype="S")
    return np.asarray(ids)


def _plain_ids(stored: np.ndarray) -> list[Any]:
    if stored.dtype.kind == "S":
        return [i.decode() for i in stored.tolist()]
    return stored.tolist()


def _axis(group: h5py.Group, name: str, ids: Sequence[Any]) -> None:
    values = _ids_array(ids)
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
    tables: list[tuple[str, pd.DataFrame, list[str]]] = field(default_factory=list)

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
            pandas_version="0.15.2",
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
            values,
            CLASS="CARRAY",
            VERSION="1.1",
            TITLE="",
            FLAVOR="numpy",
            transposed=np.uint8(1),
        )
        return values

    def vector(self, key: str, values: Sequence[Any] | np.ndarray) -> None:
        """Write one value a sample, or ids."""
        array = _ids_array(values) if isinstance(values, list) else np.asarray(values)
        self.file.create_dataset(key, data=array, chunks=array.shape, fletcher32=True)

    def scalar(self, key: str, value: float) -> None:
        """Write one number."""
        self.file.create_dataset(key, data=value)

    def table(self, key: str, rows: pd.DataFrame, searchable: Sequence[str]) -> None:
        """Write a small table by pandas itself; ``where=`` can name the ``searchable`` columns."""
        self.tables.append((key, rows, list(searchable)))


def _blocks(dataset: h5py.Dataset) -> Iterator[np.ndarray]:
    if dataset.shape == ():
        yield np.asarray(dataset[()])
        return
    row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
    rows = max(1, _HASH_BLOCK_BYTES // max(1, row_bytes))
    if dataset.chunks and rows > dataset.chunks[0]:
        rows = rows // dataset.chunks[0] * dataset.chunks[0]
    for start in range(0, dataset.shape[0], rows):
        yield dataset[start : start + rows]


def _attribute_bytes(value: Any) -> bytes:
    if isinstance(value, h5py.Empty):
        return b""
    return value.encode() if isinstance(value, str) else np.asarray(value).tobytes()


def _content_hash(file: h5py.File) -> str:
    """Hash names, attributes, dtypes, shapes and values of all that a file holds.

    Returns:
        32 hexadecimal digits.

    Raises:
        ValueError: If a floating-point value is not finite; it names the dataset.
    """
    digest = hashlib.blake2b(digest_size=16)

    def visit(name: str, node: h5py.Group | h5py.Dataset) -> None:
        digest.update(name.encode() + b"\0")
        for attribute in sorted(node.attrs):
            if (name, attribute) != ("", "content-hash"):
                digest.update(attribute.encode() + b"\0" + _attribute_bytes(node.attrs[attribute]))
        if isinstance(node, h5py.Dataset):
            digest.update(f"{node.dtype.descr}{node.shape}".encode())
            # Nothing here is compressed or sparse: a damaged shape would read as endless zeros.
            if node.id.get_storage_size() < node.size * node.dtype.itemsize:
                raise ValueError(f"{name!r} is shorter than its shape {node.shape}")
            for block in _blocks(node):
                if block.dtype.kind == "f" and not np.isfinite(block).all():
                    raise ValueError(f"{name!r} holds NaN or infinity")
                digest.update(np.ascontiguousarray(block).data)

    visit("", file)
    file.visititems(visit)
    return digest.hexdigest()


@contextlib.contextmanager
def create(
    path: Path, kind: str, spec: Mapping[str, Any], provenance: Mapping[str, Any], **attributes: Any
) -> Generator[Writer, None, None]:
    """Write one artifact: the file appears complete under ``path``, or not at all.

    Args:
        path: Final name; its folder is made.
        kind: The ``encoding-type``.
        spec: Everything that decides the numbers, as plain values.
        provenance: Software and device; no clock times, so that a repeated run is byte-identical.
        **attributes: More root attributes.

    Yields:
        The writer. On an exception the temporary file goes and ``path`` stays as it was.

    Raises:
        ArtifactError: If a value written is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with h5py.File(partial, "w") as file:
            _put_attributes(
                file,
                **{"encoding-type": kind, "encoding-version": VERSION},
                spec=json.dumps(spec, sort_keys=True),
                provenance=json.dumps(provenance, sort_keys=True),
                **attributes,
            )
            writer = Writer(file)
            yield writer
        # One library at a time: PyTables, under pandas, brings an HDF5 of its own.
        for key, rows, searchable in writer.tables:
            with pd.HDFStore(partial, "a") as store:
                store.put(
                    key,
                    rows,
                    format="table",
                    data_columns=searchable,
                    index=False,
                    track_times=False,
                )
        with h5py.File(partial, "r+") as file:
            try:
                _put_attributes(file, **{"content-hash": _content_hash(file)})
            except ValueError as error:
                raise ArtifactError(
                    f"{path}: every number of an artifact must be finite, but {error}. "
                    "Nothing was written."
                ) from error
        descriptor = os.open(partial, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified file, open for reading; see ``open_artifact``."""

    path: Path
    file: h5py.File
    spec: dict[str, Any]
    content_hash: str

    def _dataset(self, key: str) -> h5py.Dataset:
        dataset = self.file[key]
        assert isinstance(dataset, h5py.Dataset)
        return dataset

    def matrix(self, key: str) -> h5py.Dataset:
        """Return the values of a frame, to be read by blocks."""
        return self._dataset(f"{key}/block0_values")

    def index(self, key: str) -> list[Any]:
        """Return the row ids of a frame."""
        return _plain_ids(self.vector(f"{key}/axis1"))

    def columns(self, key: str) -> list[Any]:
        """Return the column ids of a frame."""
        return _plain_ids(self.vector(f"{key}/axis0"))

    def has(self, key: str) -> bool:
        """Return whether the file holds this key."""
        return key in self.file

    def vector(self, key: str) -> np.ndarray:
        """Return one value a sample."""
        return np.asarray(self._dataset(key)[:])

    def ids(self, key: str) -> list[Any]:
        """Return ids stored as a vector."""
        return _plain_ids(self.vector(key))

    def scalar(self, key: str) -> float:
        """Return one number."""
        return float(np.asarray(self._dataset(key)[()]))


@contextlib.contextmanager
def open_artifact(path: Path, kind: str) -> Generator[Artifact, None, None]:
    """Open an artifact after making sure of all of it.

    Args:
        path: The file.
        kind: The ``encoding-type`` it must have.

    Yields:
        The open artifact.

    Raises:
        ArtifactError: If the file is not there, damaged, of another kind or version, incomplete,
            or not finite. It names the file, what was expected and found, and the rule that
            remakes it.
    """
    keys, rule = _KINDS[kind]
    remake = f"Delete the file and run snakemake again: rule {rule} remakes it."
    if not path.is_file():
        raise ArtifactError(f"{path}: a {kind} file must be here. Found nothing. {remake}")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ArtifactError(
            f"{path}: a {kind} file must be readable HDF5. Found {str(error).splitlines()[0]}. "
            f"{remake}"
        ) from error
    with file:
        try:
            found = (file.attrs.get("encoding-type"), file.attrs.get("encoding-version"))
            found = tuple(v.decode() if isinstance(v, bytes) else v for v in found)
            if found != (kind, VERSION):
                raise ArtifactError(
                    f"{path}: the file must be {kind}, version {VERSION}. Found {found[0]}, "
                    f"version {found[1]}. {remake}"
                )
            missing = [key for key in keys if key not in file]
            if missing:
                raise ArtifactError(
                    f"{path}: a {kind} file must hold {', '.join(keys)}. Missing: "
                    f"{', '.join(missing)}. {remake}"
                )
            stored = file.attrs.get("content-hash")
            stored = stored.decode() if isinstance(stored, bytes) else stored
            computed = _content_hash(file)
            if stored != computed:
                raise ArtifactError(
                    f"{path}: the content must have the hash stored with it. Found {computed}, "
                    f"stored {stored}: the file was changed or damaged. {remake}"
                )
            spec = file.attrs["spec"]
            spec = json.loads(spec.decode() if isinstance(spec, bytes) else str(spec))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(
                f"{path}: a {kind} file must be whole. Reading it failed: "
                f"{str(error).splitlines()[0]}. {remake}"
            ) from error
        yield Artifact(path, file, spec, computed)


def check_same(what: str, expected: Any, found: Any, path: Path, rule: str) -> None:
    """Refuse a file that was not made for what it is about to be combined with.

    Args:
        what: The part of the specification compared, in words.
        expected: What the config or the other file says.
        found: What this file says.
        path: This file.
        rule: The rule that makes it.

    Raises:
        ArtifactError: If the two differ; dicts are compared key by key.
    """
    if expected == found:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        expected = {k: expected.get(k) for k in keys}
        found = {k: found.get(k) for k in keys}
    raise ArtifactError(
        f"{path}: files to be combined must agree in the {what}. Expected {_short(expected)}, "
        f"found {_short(found)}. Delete the file and run snakemake again: rule {rule} remakes it."
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

"""Define the file format of artifacts, the HDF5 files in which jobs store their results.

Each dataset has Fletcher-32 checksums, and the layout of HDF5 1.10 has checksums of all metadata.
Therefore h5py and pandas raise an error when they read a flipped bit.

The attributes ``spec`` and ``provenance`` contain mappings as JSON, but without their lists. An
attribute is limited to 64 KiB, and the lists of a large study can be longer. They are stored in a
group that has the same name as the attribute. Each list is a vector in this group, with one JSON
text for each element. To read a mapping with h5py:

    spec = json.loads(file.attrs["spec"])
    for key, rows in file.get("spec", {}).items():
        spec[key] = [json.loads(row) for row in rows[:]]
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import h5py
import numpy as np

from trak_core.errors import InputError

VERSION = 2
# Earlier versions of the HDF5 layout have no checksums of metadata, and the HDF5 library of
# PyTables cannot read later versions.
LIBVER = ("v110", "v110")


@dataclass(frozen=True, slots=True)
class ArtifactKind:
    """A kind of artifact file.

    ``samples`` maps the name of each vector of ids to the names of the vectors that must have the
    same length.
    """

    encoding_type: str  # the value of the file's attribute ``encoding-type``
    keys: tuple[str, ...]  # names of datasets and groups that the file must contain
    rule: str  # the name of the workflow rule that writes the file
    samples: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


_COLUMNS = ("labels", "outputs", "predictions")
_TRAIN_COLUMNS = ("loss_weights", "curvature")
_TARGET_COLUMNS = tuple(f"target_{column}" for column in _COLUMNS)
_SCORED = {
    "train_ids": ("similarities/axis1", "loss_weights", *(f"train_{c}" for c in _COLUMNS)),
    "target_ids": ("similarities/axis0", "solved_targets/axis0", *_TARGET_COLUMNS),
}
_OF_SAMPLES = {"sample_ids": ("features/axis1", "gramian/axis0", *_COLUMNS, *_TRAIN_COLUMNS)}
_MATRIX = {"normal_matrix/axis0": ("normal_matrix/axis1",)}
FEATURES = ArtifactKind(
    "trak-features", ("features", "outputs", "sample_ids"), "compute_features", _OF_SAMPLES
)
FEATURE_SHARD = replace(FEATURES, rule="compute_features_shard")
NORMAL_MATRIX = ArtifactKind(
    "trak-normal-matrix", ("normal_matrix", "mean_squared_norm"), "compute_normal_matrix", _MATRIX
)
CHECKPOINT_SCORES = ArtifactKind(
    "trak-scores", ("loss_weights", "train_ids", "target_ids"), "compute_scores", _SCORED
)
GRAMIAN = ArtifactKind(
    "trak-gramian", ("gramian", "outputs", "sample_ids"), "compute_gramian", _OF_SAMPLES
)
# With ``projection: exact``, another rule writes the scores of each checkpoint.
EXACT_SCORES = replace(CHECKPOINT_SCORES, rule="compute_exact_scores")
SCORES = ArtifactKind("trak-scores", ("top_influences", "targets", "train"), "average_scores")
RETRAINED = ArtifactKind("trak-retrained", ("masks", "outputs", "predictions"), "retrain_subsets")
EMBEDDINGS = ArtifactKind("trak-embeddings", ("train", "targets"), "compute_embeddings")
ANSWERS = ArtifactKind("trak-answers", ("targets", "train"), "draw_influences")
SELF_INFLUENCE = ArtifactKind("trak-self-influence", ("train",), "compute_self_influence")
OUTPUTS = ArtifactKind("trak-outputs", ("sample_ids", *_COLUMNS), "compute_outputs", _OF_SAMPLES)
TARGETS = ArtifactKind("trak-targets", ("targets",), "select_targets")
GROUPS = ArtifactKind("trak-groups", ("groups", "targets"), "sum_groups")
TOKEN_SCORES = ArtifactKind("trak-token-scores", ("tokens", "layers"), "compute_token_scores")
_TABLES = ("summary", "targets", "checkpoints")
EVALUATION = ArtifactKind("trak-evaluation", _TABLES, "evaluate_scores")
REMOVALS = ArtifactKind("trak-evaluation", ("summary", "targets"), "compare_removals")
# ``verify`` returns the first of these kinds that has the file's encoding type, and whose keys are
# all in the file.
KINDS = (FEATURES, NORMAL_MATRIX, GRAMIAN, CHECKPOINT_SCORES, SCORES, RETRAINED)
KINDS += (EMBEDDINGS, SELF_INFLUENCE, ANSWERS, GROUPS, OUTPUTS, TARGETS, TOKEN_SCORES)
KINDS += (EVALUATION, REMOVALS)  # The keys of REMOVALS are also in every EVALUATION file.


class ArtifactError(InputError):
    """The error for an artifact that is missing, damaged, or was written for other settings."""


def ids_array(ids: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return ids as a file stores them: integers, or UTF-8 strings of a fixed length."""
    if not isinstance(ids, np.ndarray) and all(isinstance(i, str) for i in ids):
        return np.array([i.encode() for i in ids], dtype="S")
    return np.asarray(ids)


def plain_ids(stored: np.ndarray) -> list[Any]:
    """Return the ids in an array as Python integers or strings. Bytes are decoded as UTF-8."""
    values = stored.tolist()
    return [i.decode() for i in values] if stored.dtype.kind == "S" else values


def _blocks(dataset: h5py.Dataset) -> Iterator[np.ndarray]:
    if not dataset.chunks:  # a scalar or an empty dataset
        yield np.asarray(dataset[()])
        return
    for start in range(0, len(dataset), dataset.chunks[0]):
        yield dataset[start : start + dataset.chunks[0]]


def _is_finite(block: np.ndarray) -> bool:
    if block.dtype.names:
        return all(_is_finite(block[name]) for name in block.dtype.names)
    return block.dtype.kind != "f" or bool(np.isfinite(block).all())


new_hash = partial(hashlib.blake2b, digest_size=16)


def add_rows(digest: "hashlib.blake2b", name: str, block: np.ndarray) -> None:
    """Add rows of a dataset to a hash. Raise a ``ValueError`` if a number is not finite."""
    if not _is_finite(block):
        raise ValueError(f"{name!r} contains NaN or infinity")
    digest.update(np.ascontiguousarray(block).data)


def content_hash(file: h5py.File, known: Mapping[str, str] | None = None) -> str:
    """Return a hash of all names, attributes, dtypes, shapes and values in a file.

    The hash has 32 hexadecimal digits. ``known`` may contain hashes of the values of datasets, by
    name. These datasets are then not read. Raise a ``ValueError`` if a number is NaN or infinite.
    """
    digest, known = new_hash(), known or {}

    def visit(name: str, node: h5py.Group | h5py.Dataset) -> None:
        digest.update(name.encode() + b"\0")
        for attribute in sorted(node.attrs):
            if (name, attribute) != ("", "content-hash"):
                value = node.attrs[attribute]
                value = b"" if isinstance(value, h5py.Empty) else np.asarray(value).tobytes()
                digest.update(attribute.encode() + b"\0" + value)
        if isinstance(node, h5py.Dataset):
            digest.update(f"{node.dtype.descr}{node.shape}".encode())
            values = new_hash()
            for block in () if name in known else _blocks(node):
                add_rows(values, name, block)
            digest.update(known.get(name, values.hexdigest()).encode())

    visit("", file)
    file.visititems(visit)
    return digest.hexdigest()


def put_attributes(node: h5py.Group | h5py.Dataset, **attributes: Any) -> None:
    """Write attributes. Strings become UTF-8 of fixed length, the only kind that PyTables reads."""
    for name, value in attributes.items():
        if isinstance(value, str):
            text = value.encode()
            dtype = h5py.string_dtype("utf-8", max(1, len(text)))
            node.attrs.create(name, np.bytes_(text), dtype=dtype)
        else:
            node.attrs[name] = value


def write_object(file: h5py.File, name: str, value: Mapping[str, Any]) -> None:
    """Write a mapping of JSON values: each list as a dataset, and the rest as one attribute."""
    lists = {key: part for key, part in value.items() if isinstance(part, list | tuple)}
    others = {key: part for key, part in value.items() if key not in lists}
    put_attributes(file, **{name: json.dumps(others, sort_keys=True)})
    group = file.create_group(name) if lists else file
    for key in sorted(lists):  # json.dumps returns ASCII, which the dtype S can store.
        texts = [json.dumps(element, sort_keys=True).encode() for element in lists[key]]
        put_vector(group, key, np.array(texts, dtype="S"))


def put_vector(group: h5py.Group, name: str, values: np.ndarray, chunk: int | None = None) -> Any:
    """Write values to a new dataset, with checksums unless it is empty. Return the dataset."""
    chunks = (min(len(values), chunk or len(values)),)
    stored: dict[str, Any] = {"chunks": chunks, "fletcher32": True} if len(values) else {}
    return group.create_dataset(name, data=values, **stored)


def read_object(file: h5py.File, name: str) -> dict[str, Any]:
    """Return the mapping that ``write_object`` wrote under the given name."""
    text = file.attrs[name]
    value: dict[str, Any] = json.loads(text.decode() if isinstance(text, bytes) else str(text))
    lists: Any = file.get(name, {})
    return value | {key: [json.loads(row) for row in rows[:]] for key, rows in lists.items()}


def scales_of(key: str) -> str:
    """Return the name of the vector with the scale of each row of the int8 matrix ``key``."""
    return f"{key}_scales"


def scaled_integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows quantized to int8, shape (n, k), and a float32 scale for each row, shape (n,).

    The rows are approximately ``integers * scales[:, None]``. In each row, the entry with the
    largest absolute value becomes 127 or -127. Scales are rounded up to 17 significant bits.
    Therefore the products are exact in float32, and quantizing the products gives the same integers
    again. A row of zeros has the scale 0. A row with NaN, infinity, or numbers close to the maximum
    of float32 has the scale NaN.
    """
    most = np.abs(rows).max(axis=1, initial=0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        # 2^-149 is the smallest positive float32.
        unit = np.ldexp(1.0, np.maximum(np.frexp(most / 127)[1] - 17, -149))
        scales = np.ceil(most / 127 / unit) * unit
        scales = np.where(127 * scales <= np.finfo(np.float32).max, scales, np.nan)
        whole = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
    whole[~np.isfinite(scales)] = 0
    return whole.astype(np.int8), scales.astype(np.float32)


def table_columns(
    table: h5py.Dataset, columns: Iterable[tuple[str, str, int]], read: slice = slice(None)
) -> dict[str, Any]:
    """Return the columns of a table that pandas wrote, by name.

    pandas stores several columns of a table in one field. ``columns`` contains each column's name,
    field, and index within the field. ``read`` selects rows.
    """
    rows, values = table[read], {}
    for name, field_name, index in columns:
        block = rows[field_name]
        column = block if block.ndim == 1 else block[:, index]
        values[name] = plain_ids(column) if column.dtype.kind == "S" else column
    return values


_MOST_UNPACKED = 1032  # the largest compression ratio that zlib can reach
_PLAIN_FILTERS = {h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SHUFFLE}


def check_stored(file: h5py.File, name: str) -> None:
    """Raise a ``ValueError`` for a link, or for a dataset whose values are not all in the file.

    For values that the file does not contain, HDF5 would return zeros.
    """
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name!r} is a link to another object")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        return
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{name!r} stores its values in another file")
    plist, stored = dataset.id.get_create_plist(), dataset.id.get_storage_size()
    filters = {plist.get_filter(i)[0] for i in range(plist.get_nfilters())}
    most = stored if filters <= _PLAIN_FILTERS else stored * _MOST_UNPACKED
    n_bytes = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    if dataset.shape is None or n_bytes > most or stored > file.id.get_filesize():
        raise ValueError(
            f"{name!r} has shape {dataset.shape} and dtype {dataset.dtype}, but the file contains "
            f"only {stored} bytes of its values"
        )


def dataset_in(file: h5py.Group, name: str) -> h5py.Dataset:
    node = file.get(name)
    if not isinstance(node, h5py.Dataset):
        raise ValueError(f"{name!r} must be a dataset, but it is {type(node).__name__}")
    return node


def _described(dataset: h5py.Dataset) -> str:
    return f"shape {dataset.shape}, dtype {dataset.dtype}"


def _check_frame(name: str, group: h5py.Group) -> None:
    parts = ("block0_values", "axis1", "axis0")
    values, rows, columns = (dataset_in(group, part) for part in parts)
    for axis in (rows, columns):
        if axis.ndim != 1 or axis.dtype.kind not in "iuS":
            raise ValueError(
                f"{axis.name!r} must be a vector of integers or strings. Found {_described(axis)}"
            )
    expected = (rows.size, columns.size)
    if values.shape != expected or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{name!r} must contain numbers of shape {expected} to match its row and column ids. "
            f"Found {_described(values)}"
        )
    if values.dtype == np.int8:
        scales = dataset_in(group.file, scales_of(name))
        if scales.shape != rows.shape or scales.dtype != np.float32:
            raise ValueError(
                f"{scales.name!r} must contain {rows.size} numbers of dtype float32. Found "
                f"{_described(scales)}"
            )


def check_layout(file: h5py.File, kind: ArtifactKind) -> None:
    """Raise a ``ValueError`` if the shape of a matrix or vector does not match its ids."""
    for name, node in file.items():
        if isinstance(node, h5py.Group) and "block0_values" in node:
            _check_frame(name, node)
    for ids, vectors in kind.samples.items():
        if ids.split("/")[0] not in {*file, *kind.keys}:
            continue
        size = dataset_in(file, ids).size
        for name in (ids, *vectors):
            if name.split("/")[0] not in file:
                continue
            vector = dataset_in(file, name)
            if vector.shape != (size,) or vector.dtype.kind not in "fiubS":
                raise ValueError(
                    f"{name!r} must have one entry for each of the {size} ids in {ids!r}. Found "
                    f"{_described(vector)}"
                )

"""The file format that writer and reader share: kinds, layout, JSON objects and content hash.

Every dataset with values has HDF5's own checksums, Fletcher-32, and the file the layout of HDF5
1.10, which has checksums of all else: names, attributes, shapes and places. So h5py and pandas
notice a flipped bit where they read it.

Specification and provenance are JSON in an attribute each, except for their lists, because an
attribute holds 64 KiB and lists grow with a study. Each list is a vector in the group of the same
name, one JSON text an element. With h5py alone:

    spec = json.loads(file.attrs["spec"])
    for key, rows in file.get("spec", {}).items():
        spec[key] = [json.loads(row) for row in rows[:]]
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from trak_core.errors import InputError
from trak_core.spec import EXACT, GAUSS_NEWTON

VERSION = 2
# HDF5 of before has no checksums of metadata; PyTables brings an HDF5 that can read no later one.
LIBVER = ("v110", "v110")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ArtifactKind:
    """One kind of file: the name that it gives itself, what it must hold, and its rule.

    ``samples`` are vectors of ids, each with the vectors that have as many entries, if those are
    there.
    """

    encoding_type: str
    keys: tuple[str, ...]
    rule: str
    samples: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


_COLUMNS = ("labels", "outputs", "predictions")
_TRAIN_COLUMNS = ("loss_weights", "curvature")
_TARGET_COLUMNS = tuple(f"target_{column}" for column in _COLUMNS)
FEATURES = ArtifactKind(
    "trak-features",
    ("features", "outputs", "sample_ids"),
    "compute_features",
    {"sample_ids": ("features/axis1", *_COLUMNS, *_TRAIN_COLUMNS)},
)
FEATURE_SHARD = replace(FEATURES, rule="compute_features_shard")
NORMAL_MATRIX = ArtifactKind(
    "trak-normal-matrix",
    ("normal_matrix", "mean_squared_norm"),
    "compute_normal_matrix",
    {"normal_matrix/axis0": ("normal_matrix/axis1",)},
)
CHECKPOINT_SCORES = ArtifactKind(
    "trak-scores",
    ("loss_weights", "train_ids", "target_ids"),
    "compute_scores",
    {
        "train_ids": ("similarities/axis1", "loss_weights", *(f"train_{c}" for c in _COLUMNS)),
        "target_ids": ("similarities/axis0", "solved_targets/axis0", *_TARGET_COLUMNS),
    },
)
GRAMIAN = ArtifactKind(
    "trak-gramian",
    ("gramian", "outputs", "sample_ids"),
    "compute_gramian",
    {"sample_ids": ("gramian/axis0", *_COLUMNS, *_TRAIN_COLUMNS)},
)
# The same files by other roads.
EXACT_SCORES = replace(CHECKPOINT_SCORES, rule="compute_exact_scores")
NEWTON_SCORES = replace(CHECKPOINT_SCORES, rule="compute_newton_scores")
SCORES = ArtifactKind("trak-scores", ("top_influences", "targets", "train"), "average_scores")
SCORES_SHARD = ArtifactKind("trak-scores-shard", (), "average_scores_shard")
RETRAINED = ArtifactKind("trak-retrained", ("masks", "outputs", "predictions"), "retrain_subsets")
EMBEDDINGS = ArtifactKind("trak-embeddings", ("train", "targets"), "compute_embeddings")
ANSWERS = ArtifactKind("trak-answers", ("targets", "train"), "draw_influences")
SELF_INFLUENCE = ArtifactKind("trak-self-influence", ("train",), "compute_self_influence")
OUTPUTS = ArtifactKind(
    "trak-outputs",
    ("sample_ids", "labels", "outputs", "predictions"),
    "compute_outputs",
    {"sample_ids": _COLUMNS},
)
TARGETS = ArtifactKind("trak-targets", ("targets",), "select_targets")
GROUPS = ArtifactKind("trak-groups", ("groups", "targets"), "sum_groups")
TOKEN_SCORES = ArtifactKind("trak-token-scores", ("tokens", "layers"), "compute_token_scores")
_TABLES = ("summary", "targets", "checkpoints")
EVALUATION = ArtifactKind("trak-evaluation", _TABLES, "evaluate_scores")
REMOVALS = ArtifactKind("trak-evaluation", ("summary", "targets"), "compare_removals")
# Every kind once; ``verify`` knows a file by its type and keys.
KINDS = (
    *(FEATURES, NORMAL_MATRIX, GRAMIAN, CHECKPOINT_SCORES, SCORES),
    SCORES_SHARD,
    *(RETRAINED, EMBEDDINGS, SELF_INFLUENCE, ANSWERS, GROUPS, OUTPUTS, TARGETS),
    TOKEN_SCORES,
    *(EVALUATION, REMOVALS),
)


def checkpoint_scores_kind(projection: Mapping[str, Any]) -> ArtifactKind:
    """Return the kind of one checkpoint's scores by the projection of their spec."""
    others = {EXACT: EXACT_SCORES, GAUSS_NEWTON: NEWTON_SCORES}
    return others.get(projection.get("kind", ""), CHECKPOINT_SCORES)


class ArtifactError(InputError):
    """A file is not the artifact that its reader needs."""


def ids_array(ids: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return ids as they are stored: integers, or UTF-8 strings of a fixed length."""
    if isinstance(ids, np.ndarray):
        return ids
    if all(isinstance(i, str) for i in ids):
        return np.array([i.encode() for i in ids], dtype="S")
    return np.asarray(ids)


def plain_ids(stored: np.ndarray) -> list[Any]:
    """Return stored ids as Python integers or strings."""
    if stored.dtype.kind == "S":
        return [i.decode() for i in stored.tolist()]
    return stored.tolist()


def _blocks(dataset: h5py.Dataset) -> Iterator[np.ndarray]:
    if not dataset.chunks:  # one value, or none
        yield np.asarray(dataset[()])
        return
    for start in range(0, len(dataset), dataset.chunks[0]):
        yield dataset[start : start + dataset.chunks[0]]


def _is_finite(block: np.ndarray) -> bool:
    if block.dtype.names:
        return all(_is_finite(block[name]) for name in block.dtype.names)
    return block.dtype.kind != "f" or bool(np.isfinite(block).all())


class ValuesHash:
    """A hash of a dataset's values, from the first to the last, which must be finite."""

    def __init__(self, name: str) -> None:
        """Begin with the values of the dataset of this name."""
        self._name, self._digest = name, hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, block: np.ndarray) -> None:
        """Go on with the next rows; a ``ValueError`` says that one is not finite."""
        if not _is_finite(block):
            raise ValueError(f"{self._name!r} holds NaN or infinity")
        self._digest.update(np.ascontiguousarray(block).data)

    def hexdigest(self) -> str:
        """Return the hash."""
        return self._digest.hexdigest()


def content_hash(file: h5py.File, known: Mapping[str, str] | None = None) -> str:
    """Return a hash of names, attributes, dtypes, shapes and values in a file: 32 hex digits.

    Datasets whose ``ValuesHash`` is known, by name, are not read again. A ``ValueError`` names a
    dataset that holds a number that isn't finite.
    """
    digest, known = hashlib.blake2b(digest_size=_DIGEST_BYTES), known or {}

    def visit(name: str, node: h5py.Group | h5py.Dataset) -> None:
        digest.update(name.encode() + b"\0")
        for attribute in sorted(node.attrs):
            if (name, attribute) != ("", "content-hash"):
                value = node.attrs[attribute]
                value = b"" if isinstance(value, h5py.Empty) else np.asarray(value).tobytes()
                digest.update(attribute.encode() + b"\0" + value)
        if isinstance(node, h5py.Dataset):
            digest.update(f"{node.dtype.descr}{node.shape}".encode())
            values = ValuesHash(name)
            for block in () if name in known else _blocks(node):
                values.add(block)
            digest.update(known.get(name, values.hexdigest()).encode())

    visit("", file)
    file.visititems(visit)
    return digest.hexdigest()


def put_attributes(node: h5py.Group | h5py.Dataset, **attributes: Any) -> None:
    """Write attributes: PyTables reads texts only as UTF-8 of a fixed length."""
    for name, value in attributes.items():
        if isinstance(value, str):
            text = value.encode()
            dtype = h5py.string_dtype("utf-8", max(1, len(text)))
            node.attrs.create(name, np.bytes_(text), dtype=dtype)
        else:
            node.attrs[name] = value


def write_object(file: h5py.File, name: str, value: Mapping[str, Any]) -> None:
    """Write plain values as an attribute; the lists among them, of any size, as datasets."""
    lists = {key: part for key, part in value.items() if isinstance(part, list | tuple)}
    others = {key: part for key, part in value.items() if key not in lists}
    put_attributes(file, **{name: json.dumps(others, sort_keys=True)})
    group = file.create_group(name) if lists else file
    for key in sorted(lists):  # JSON is ASCII here
        texts = [json.dumps(element, sort_keys=True).encode() for element in lists[key]]
        put_vector(group, key, np.array(texts, dtype="S"))


def put_vector(group: h5py.Group, name: str, values: np.ndarray, chunk: int | None = None) -> Any:
    """Return a new dataset of these values, with checksums, which nothing at all needs none of."""
    chunks = (min(len(values), chunk or len(values)),)
    stored: dict[str, Any] = {"chunks": chunks, "fletcher32": True} if len(values) else {}
    return group.create_dataset(name, data=values, **stored)


def read_object(file: h5py.File, name: str) -> dict[str, Any]:
    """Return what ``write_object`` wrote; a ``ValueError`` if it is something else."""
    text = file.attrs[name]
    value = json.loads(text.decode() if isinstance(text, bytes) else str(text))
    if not isinstance(value, dict):
        raise ValueError(f"an attribute must be a JSON object, found {type(value).__name__}")
    lists: Any = file.get(name, {})
    return value | {key: [json.loads(row) for row in rows[:]] for key, rows in lists.items()}


def scales_of(key: str) -> str:
    """Return the name of the scales of a frame's rows, which a frame of int8 comes with."""
    return f"{key}_scales"


def scaled_integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as int8, shape (n, k), and the scale that each must be multiplied by.

    A row's largest entry becomes 127 or -127, the others the nearest integers. A scale, float32,
    has 17 significant bits, rounded up, so that float32 holds every product exactly, and rows with
    an entry of 1e-37 or more are the same when what was read is stored again. Rows of zeros have
    the scale 0. A row with NaN or infinity, or too close to the end of float32, has the scale NaN.
    """
    most = np.abs(rows).max(axis=1, initial=0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        # Float32's smallest step is 2^-149.
        unit = np.ldexp(1.0, np.maximum(np.frexp(most / 127)[1] - 17, -149))
        scales = np.ceil(most / 127 / unit) * unit
        scales = np.where(127 * scales <= np.finfo(np.float32).max, scales, np.nan)
        whole = np.rint(rows / np.where(scales > 0, scales, 1)[:, None])
    whole[~np.isfinite(scales)] = 0
    return whole.astype(np.int8), scales.astype(np.float32)


def table_columns(
    table: h5py.Dataset, columns: Iterable[tuple[str, str, int]], read: slice = slice(None)
) -> dict[str, Any]:
    """Return columns of a table that pandas wrote, by name, field and place in the field.

    A field is a column, or a block of columns of one dtype: strings or numbers. ``read`` are the
    rows to be read.
    """
    rows, values = table[read], {}
    for name, part, place in columns:
        column = rows[part] if rows[part].ndim == 1 else rows[part][:, place]
        values[name] = plain_ids(column) if column.dtype.kind == "S" else column
    return values


# No more than so many bytes come of one that zlib wrote.
_MOST_UNPACKED = 1032
_PLAIN_FILTERS = {h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SHUFFLE}


def check_stored(file: h5py.File, name: str) -> None:
    """Refuse, by a ``ValueError``, a link, and a dataset whose file does not hold all its values.

    They may lie in another file, or be fewer than its shape says: HDF5 would fill in zeros.
    """
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name!r} is a link to another place")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        return
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{name!r} takes its values from another file")
    plist, stored = dataset.id.get_create_plist(), dataset.id.get_storage_size()
    filters = {plist.get_filter(i)[0] for i in range(plist.get_nfilters())}
    most = stored if filters <= _PLAIN_FILTERS else stored * _MOST_UNPACKED
    n_bytes = math.prod(dataset.shape or ()) * dataset.dtype.itemsize
    if dataset.shape is None or n_bytes > most or stored > file.id.get_filesize():
        raise ValueError(
            f"{name!r} has the shape {dataset.shape} of {dataset.dtype}, and the file {stored} "
            "bytes of it"
        )


def dataset_in(file: h5py.Group, name: str) -> h5py.Dataset:
    node = file.get(name)
    if not isinstance(node, h5py.Dataset):
        raise ValueError(f"{name!r} must be a dataset, found {type(node).__name__}")
    return node


def _check_frame(name: str, group: h5py.Group) -> None:
    values, rows, columns, items = (
        dataset_in(group, part) for part in ("block0_values", "axis1", "axis0", "block0_items")
    )
    for axis in (rows, columns, items):
        if axis.ndim != 1 or axis.dtype.kind not in "iuS":
            raise ValueError(
                f"{axis.name!r} must be a vector of integers or strings, found shape {axis.shape}, "
                f"dtype {axis.dtype}"
            )
    expected = (rows.size, columns.size)
    if values.shape != expected or items.size != columns.size or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{name!r} must hold numbers of shape {expected}, one row and one column an id, found "
            f"shape {values.shape}, dtype {values.dtype}"
        )
    if values.dtype == np.int8:
        scales = dataset_in(group.file, scales_of(name))
        if scales.shape != rows.shape or scales.dtype != np.float32:
            raise ValueError(
                f"{scales.name!r} must hold a scale for each of {rows.size} rows, float32, found "
                f"shape {scales.shape}, dtype {scales.dtype}"
            )


def check_layout(file: h5py.File, kind: ArtifactKind) -> None:
    """Refuse, by a ``ValueError``, frames and vectors of samples without one id or entry each."""
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
                    f"{name!r} must have one entry for each of the {size} {ids!r}, found shape "
                    f"{vector.shape}, dtype {vector.dtype}"
                )

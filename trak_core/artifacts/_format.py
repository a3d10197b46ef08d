"""What writer and reader share: kinds of files, ids, and the hash of a file's content."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np

from trak_core.errors import InputError

VERSION = 1
_HASH_BLOCK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file.

    Attributes:
        encoding_type: What the file calls itself.
        keys: What it must hold at least.
        rule: The rule that makes it.
        samples: Vectors of ids, each with what has as many entries, where the file holds that.
    """

    encoding_type: str
    keys: tuple[str, ...]
    rule: str
    samples: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


_COLUMNS = ("labels", "outputs", "predictions")
_TRAIN_COLUMNS = ("loss_weights", "curvature")
_FEATURES = ("features", "outputs", "sample_ids")
_FEATURES_SAMPLES = {"sample_ids": ("features/axis1", *_COLUMNS, *_TRAIN_COLUMNS)}
FEATURES = Kind("trak-features", _FEATURES, "compute_features", _FEATURES_SAMPLES)
FEATURE_SHARD = Kind("trak-features", _FEATURES, "compute_features_shard", _FEATURES_SAMPLES)
NORMAL_MATRIX = Kind(
    "trak-normal-matrix",
    ("normal_matrix", "mean_squared_norm"),
    "compute_normal_matrix",
    {"normal_matrix/axis0": ("normal_matrix/axis1",)},
)
CHECKPOINT_SCORES = Kind(
    "trak-scores",
    ("loss_weights", "train_ids", "target_ids"),
    "compute_scores",
    {
        "train_ids": ("similarities/axis1", "loss_weights", *(f"train_{c}" for c in _COLUMNS)),
        "target_ids": (
            *("similarities/axis0", "solved_targets/axis0"),
            *(f"target_{c}" for c in _COLUMNS),
        ),
    },
)
GRAMIAN = Kind(
    "trak-gramian",
    ("gramian", "outputs", "sample_ids"),
    "compute_gramian",
    {"sample_ids": ("gramian/axis0", *_COLUMNS, *_TRAIN_COLUMNS)},
)
# The same files by another road.
EXACT_SCORES = replace(CHECKPOINT_SCORES, rule="compute_exact_scores")
SCORES = Kind("trak-scores", ("top_influences", "targets", "train"), "average_scores")
DISTORTION = Kind("trak-distortion", ("agreement", "sample_ids"), "compute_distortion")
RETRAINED = Kind("trak-retrained", ("masks", "outputs", "predictions"), "retrain_subsets")
EMBEDDINGS = Kind("trak-embeddings", ("train", "targets"), "compute_embeddings")
ANSWERS = Kind("trak-answers", ("targets", "train"), "draw_influences")
SELF_INFLUENCE = Kind("trak-self-influence", ("train",), "compute_self_influence")
EVALUATION = Kind("trak-evaluation", ("summary", "targets", "checkpoints"), "evaluate_scores")
FLIPPED = Kind("trak-evaluation", ("train", "detection"), "find_flipped")
REMOVALS = Kind("trak-evaluation", ("summary", "targets"), "compare_removals")
# Every kind once; ``verify`` knows a file by its type and keys.
KINDS = (
    *(FEATURES, NORMAL_MATRIX, GRAMIAN, CHECKPOINT_SCORES, SCORES, DISTORTION),
    *(RETRAINED, EMBEDDINGS, SELF_INFLUENCE, ANSWERS),
    *(EVALUATION, FLIPPED, REMOVALS),
)


class ArtifactError(InputError):
    """A file is not the artifact that its reader needs."""


def ids_array(ids: Sequence[Any]) -> np.ndarray:
    """Return ids as they are stored: integers, or UTF-8 strings of a fixed length."""
    if all(isinstance(i, str) for i in ids):
        return np.array([i.encode() for i in ids], dtype="S")
    return np.asarray(ids)


def plain_ids(stored: np.ndarray) -> list[Any]:
    """Return stored ids as Python integers or strings."""
    if stored.dtype.kind == "S":
        return [i.decode() for i in stored.tolist()]
    return stored.tolist()


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


def _is_finite(block: np.ndarray) -> bool:
    if block.dtype.names:
        return all(_is_finite(block[name]) for name in block.dtype.names)
    return block.dtype.kind != "f" or bool(np.isfinite(block).all())


def content_hash(file: h5py.File) -> str:
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
                if not _is_finite(block):
                    raise ValueError(f"{name!r} holds NaN or infinity")
                digest.update(np.ascontiguousarray(block).data)

    visit("", file)
    file.visititems(visit)
    return digest.hexdigest()


def table_columns(table: h5py.Dataset, columns: Iterable[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the columns of a table that pandas wrote: strings or numbers.

    Args:
        table: Rows of fields; a field is a column or a block of columns of one dtype.
        columns: Name, field and place in the field of each column.
    """
    rows, found = table[()], {}
    for name, part, place in columns:
        values = rows[part] if rows[part].ndim == 1 else rows[part][:, place]
        found[name] = plain_ids(values) if values.dtype.kind == "S" else values
    return found

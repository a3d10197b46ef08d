"""What writer and reader share: kinds of files, ids, and the hash of a file's content."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """

    encoding_type: str
    keys: tuple[str, ...]
    rule: str


_FEATURES = ("features", "outputs", "sample_ids")
FEATURES = Kind("trak-features", _FEATURES, "compute_features")
FEATURE_SHARD = Kind("trak-features", _FEATURES, "compute_feature_shard")
NORMAL_MATRIX = Kind(
    "trak-normal-matrix", ("normal_matrix", "mean_squared_norm"), "compute_normal_matrix"
)
CHECKPOINT_SCORES = Kind("trak-scores", ("loss_weights", "train_ids"), "compute_scores")
KERNEL = Kind("trak-kernel", ("kernel", "outputs", "sample_ids"), "compute_kernel")
# The same files by another road.
EXACT_SCORES = Kind("trak-scores", CHECKPOINT_SCORES.keys, "compute_exact_scores")
SCORES = Kind("trak-scores", ("top_influences", "targets", "train"), "average_scores")
DIAGNOSTICS = Kind(
    "trak-diagnostics",
    (
        *("agreement", "by_stream", "sample_ids", "kernel", "predicted_sd"),
        *("projected_kernel", "projected_squared_norms"),
    ),
    "compute_diagnostics",
)
RETRAINED = Kind("trak-retrained", ("masks", "outputs", "predictions"), "retrain_subsets")
EMBEDDINGS = Kind("trak-embeddings", ("train", "targets"), "compute_embeddings")
SELF_INFLUENCE = Kind("trak-self-influence", ("train",), "compute_self_influence")
EVALUATION = Kind("trak-evaluation", ("summary", "targets", "checkpoints"), "evaluate_scores")
MISLABELLED = Kind("trak-evaluation", ("train", "detection"), "find_mislabelled")
COUNTERFACTUAL = Kind("trak-evaluation", ("summary", "targets"), "compare_removals")
COMPARISON = Kind("trak-evaluation", ("experiments", "targets"), "compare_runs")


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
                if block.dtype.kind == "f" and not np.isfinite(block).all():
                    raise ValueError(f"{name!r} holds NaN or infinity")
                digest.update(np.ascontiguousarray(block).data)

    visit("", file)
    file.visititems(visit)
    return digest.hexdigest()

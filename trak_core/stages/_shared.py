"""Read and write what several stages share: features, normal matrices, scores, embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import (
    EMBEDDINGS,
    Artifact,
    Writer,
    check_made_for,
    check_same,
    open_artifact,
)
from trak_core.attribution.fitted_checkpoint import ReadRows, read_rows, similarity_rows
from trak_core.spec import FeaturesSpec

PER_SAMPLE = ("labels", "outputs", "predictions")


def stored_similarities(
    part: Artifact, features: Artifact | None, *, normalize: bool, in_memory: bool = False
) -> ReadRows:
    """Return how to get rows of one checkpoint's A_c: as stored, or from the solved targets.

    Unless these are to stay ``in_memory``, they are read again for every block of rows.
    """
    if features is None:
        return read_rows(part.matrix("similarities"))
    own_hash = part.spec.get("train_features")
    check_same("training features", own_hash, features.content_hash, features)
    solved = part.matrix("solved_targets")
    phi = read_rows(features.matrix("features"), normalize=normalize)
    return similarity_rows(phi, solved[:] if in_memory else solved)


def read_embeddings(
    paths: Sequence[Path],
    spec: FeaturesSpec,
    checkpoints: Sequence[str],
    train_ids: Sequence[Any],
    target_ids: Sequence[Any],
) -> Iterator[tuple[ReadRows, np.ndarray]]:
    """Yield a reader of the training samples' embeddings, and the targets', a file a checkpoint.

    Shapes are (rows, width) and (m, width); a file must be made for the ``spec``.
    """
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        with open_artifact(path, EMBEDDINGS) as file:
            check_made_for(file, spec.under(checkpoint))
            check_same("training samples", list(train_ids), file.index("train"), file)
            row = {target: i for i, target in enumerate(file.index("targets"))}
            embedded = [target for target in target_ids if target in row]
            check_same("targets", list(target_ids), embedded, file)
            # HDF5 reads rows in their own order.
            rows, place = np.unique([row[i] for i in target_ids], return_inverse=True)
            yield read_rows(file.matrix("train")), file.matrix("targets")[rows][place]


def embeddings_hashes(paths: Sequence[Path]) -> list[str]:
    """Return the content hash of each file of embeddings."""
    hashes = []
    for path in paths:
        with open_artifact(path, EMBEDDINGS) as file:
            hashes.append(file.content_hash)
    return hashes


def write_samples(writer: Writer, train: Artifact, targets: Artifact, norm: float | None) -> None:
    """Write ids and what the checkpoint makes of every sample, the loss weights, and ||B||."""
    writer.vector("loss_weights", train.vector("loss_weights"))
    if norm is not None:
        writer.scalar("train_norm", norm)
    for side, file in (("train", train), ("target", targets)):
        writer.vector(f"{side}_ids", file.vector("sample_ids"))
        for key in PER_SAMPLE:
            writer.vector(f"{side}_{key}", file.vector(key))


def naming_in_file(naming: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file of retrained models keeps of its job's ``naming``.

    Specs of other files are not kept: the content hashes of these files are.
    """
    return {key: value for key, value in naming.items() if not key.endswith("_spec")}

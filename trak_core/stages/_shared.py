"""Functions with which several stages open files and read similarities and embeddings."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EMBEDDINGS,
    EXACT_SCORES,
    Artifact,
    ArtifactKind,
    check_made_for,
    check_same,
    check_together,
    open_artifact,
)
from trak_core.attribution.fitted_checkpoint import ReadRows, read_rows, similarity_rows
from trak_core.attribution.score_formulas import unit_rows
from trak_core.evaluation.baselines import bm25_scores
from trak_core.settings import FeaturesSpec, ScoresSpec

if TYPE_CHECKING:  # These modules import torch, which some stages do not need.
    from trak_core.study.dataset_split import Split
    from trak_core.study.study import Study

PER_SAMPLE = ("labels", "outputs", "predictions")


@contextmanager
def open_made_for(
    path: Path, kind: ArtifactKind, spec: FeaturesSpec | ScoresSpec
) -> Generator[Artifact, None, None]:
    """Open a file of results, and check that it was made with the settings ``spec``."""
    with open_artifact(path, kind) as file:
        check_made_for(file, spec)
        yield file


def open_checkpoint_scores(
    stack: ExitStack, paths: Sequence[Path], spec: ScoresSpec
) -> list[Artifact]:
    """Return the opened files with the scores of each checkpoint, which ``stack`` closes later.

    Raise an error if they were not made with the settings ``spec`` or do not belong together.
    """
    kind = EXACT_SCORES if spec.features.is_exact else CHECKPOINT_SCORES
    parts = [stack.enter_context(open_artifact(path, kind)) for path in paths]
    check_together(parts, spec)
    return parts


def stored_similarities(
    parts: Sequence[Artifact],
    features: Sequence[Artifact],
    *,
    normalize: bool,
    in_memory: bool = False,
) -> list[ReadRows]:
    """Return a function for each checkpoint that returns rows of the checkpoint's similarities.

    The similarities are an array of shape (training samples, targets). If ``features`` is empty,
    the files ``parts`` contain this array, and the function reads its rows. Otherwise, the files
    contain only the matrix (N + ridge I)^-1 T^T, where N is the normal matrix and T are the target
    features. In this case, the function multiplies rows of the training features by the matrix. It
    reads the matrix again for each block of rows, unless ``in_memory`` is true.
    """
    if not features:
        return [read_rows(part.matrix("similarities")) for part in parts]
    readers = []
    for part, file in zip(parts, features, strict=True):
        check_same("training features", part.spec.get("train_features"), file.content_hash, file)
        solved = part.matrix("solved_targets")
        phi = read_rows(file.matrix("features"), normalize=normalize)
        readers.append(similarity_rows(phi, solved[:] if in_memory else solved))
    return readers


def positions(ids: Sequence[Any], wanted: Sequence[Any]) -> list[int]:
    """Return the position of each wanted id in ``ids``. Raise a ``KeyError`` if one is missing."""
    position = {sample_id: i for i, sample_id in enumerate(ids)}
    return [position[sample_id] for sample_id in wanted]


def read_directions(
    paths: Sequence[Path],
    spec: FeaturesSpec,
    checkpoints: Sequence[str],
    train_ids: Sequence[Any],
    target_ids: Sequence[Any],
) -> Iterator[tuple[ReadRows, np.ndarray]]:
    """Yield each checkpoint's embeddings of training samples and targets, divided by their norms.

    ``paths`` contains a file for each of ``checkpoints``, made with the settings ``spec``.

    Yields:
        A function that reads rows of the training samples' embeddings, and an array with the
        targets' embeddings, of shape (targets, width).
    """
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        with open_made_for(path, EMBEDDINGS, spec.under(checkpoint)) as file:
            check_same("training samples", list(train_ids), file.index("train"), file)
            row_of = {target: i for i, target in enumerate(file.index("targets"))}
            check_same("targets", list(target_ids), [i for i in target_ids if i in row_of], file)
            # h5py reads rows only in ascending order, so they are reordered afterwards.
            rows, order = np.unique([row_of[i] for i in target_ids], return_inverse=True)
            read = read_rows(file.matrix("train"), normalize=True)
            yield read, unit_rows(file.matrix("targets")[rows][order])


def bm25_of_targets(study: "Study", train: "Split", target_ids: Any) -> Iterator[np.ndarray]:
    """Yield the BM25 scores of all training texts, with the text of each target as the query."""
    return bm25_scores(study.words(train), study.words(study.split("target", target_ids)))


def embeddings_hashes(paths: Sequence[Path]) -> list[str]:
    """Return the hash of the contents of each file of embeddings."""
    hashes = []
    for path in paths:
        with open_artifact(path, EMBEDDINGS) as file:
            hashes.append(file.content_hash)
    return hashes


def naming_in_file(naming: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a retraining job's argument ``naming`` to store in the job's file.

    ``naming`` contains the settings by which the removed samples are chosen. The settings of input
    files are left out, because the file stores the hashes of the input files instead.
    """
    return {key: value for key, value in naming.items() if not key.endswith("_spec")}

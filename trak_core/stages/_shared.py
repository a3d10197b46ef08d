"""Functions that several stages use, to open files and to read similarities and embeddings."""

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
    """Open a file of results. Raise an error if it was made with settings other than ``spec``."""
    with open_artifact(path, kind) as file:
        check_made_for(file, spec)
        yield file


def open_checkpoint_scores(
    stack: ExitStack, paths: Sequence[Path], spec: ScoresSpec
) -> list[Artifact]:
    """Return the files with the scores of each checkpoint, opened until ``stack`` closes them.

    Raise an error if the files were not made with ``spec`` or do not belong together.
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
    """Return a function for each checkpoint that reads rows of the checkpoint's similarities.

    The similarities are an array of shape (training samples, targets). If ``features`` is empty,
    the files ``parts`` contain this array. Otherwise, the files contain (N + ridge I)^-1 T^T, where
    N is the normal matrix and T are the target features, and the function multiplies rows of
    training features by this matrix. The matrix is read again for each block of rows, unless
    ``in_memory`` is true.
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
    """Return the position in ``ids`` of each wanted id. A missing id raises a ``KeyError``."""
    position = {sample_id: i for i, sample_id in enumerate(ids)}
    return [position[sample_id] for sample_id in wanted]


def read_directions(
    paths: Sequence[Path],
    spec: FeaturesSpec,
    checkpoints: Sequence[str],
    train_ids: Sequence[Any],
    target_ids: Sequence[Any],
) -> Iterator[tuple[ReadRows, np.ndarray]]:
    """Yield a pair for each checkpoint: the normalized embeddings of training samples and targets.

    The embeddings of training samples are a function that reads rows. The embeddings of targets are
    an array of shape (targets, width). ``paths`` contains a file for each checkpoint.
    """
    for path, checkpoint in zip(paths, checkpoints, strict=True):
        with open_made_for(path, EMBEDDINGS, spec.under(checkpoint)) as file:
            check_same("training samples", list(train_ids), file.index("train"), file)
            row_of = {target: i for i, target in enumerate(file.index("targets"))}
            check_same("targets", list(target_ids), [i for i in target_ids if i in row_of], file)
            # HDF5 reads rows only in ascending order.
            rows, order = np.unique([row_of[i] for i in target_ids], return_inverse=True)
            read = read_rows(file.matrix("train"), normalize=True)
            yield read, unit_rows(file.matrix("targets")[rows][order])


def bm25_of_targets(study: "Study", train: "Split", target_ids: Any) -> Iterator[np.ndarray]:
    """Yield the BM25 scores of all training texts for the text of each target."""
    return bm25_scores(study.words(train), study.words(study.split("target", target_ids)))


def embeddings_hashes(paths: Sequence[Path]) -> list[str]:
    """Return the content hash of each file of embeddings."""
    hashes = []
    for path in paths:
        with open_artifact(path, EMBEDDINGS) as file:
            hashes.append(file.content_hash)
    return hashes


def naming_in_file(naming: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a retraining job's ``naming`` that are stored in the job's file.

    Settings of input files are left out, because the file stores hashes of the input files instead.
    """
    return {key: value for key, value in naming.items() if not key.endswith("_spec")}

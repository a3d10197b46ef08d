"""Read and write what several stages share: features, normal matrices, scores, retrained models."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from trak_core.artifacts import (
    EMBEDDINGS,
    FEATURES,
    NORMAL_MATRIX,
    RETRAINED,
    Artifact,
    Rows,
    Writer,
    check_made_for,
    check_retrained,
    check_same,
    open_artifact,
)
from trak_core.attribution.scores import combined, most_frequent, powered, similarities, unit_rows
from trak_core.attribution.solve import damped_factor, damped_squares, train_norm
from trak_core.config.memory_needs import CHUNK_ROWS, scores_need
from trak_core.errors import InputError
from trak_core.spec import Combine, FeaturesSpec, NormalSpec, RetrainedSpec, ScoresSpec
from trak_core.system.progress import blocks_with_progress

PER_SAMPLE = ("labels", "outputs", "predictions")

ReadRows = Callable[[int, int], np.ndarray]


def read_rows(values: Rows, *, normalize: bool = False, first: int | None = None) -> ReadRows:
    """Return a reader of rows, of ``first`` columns; ``normalize`` makes lengths 1, in float64."""
    if not normalize:
        return lambda start, stop: values[start:stop, :first]
    return lambda start, stop: unit_rows(values[start:stop, :first])


def similarity_rows(
    part: Artifact, features: Artifact | None, *, normalize: bool, in_memory: bool = False
) -> ReadRows:
    """Return how to get rows of one checkpoint's A_c: as stored, or from the solved targets.

    Unless these are to stay ``in_memory``, they are read again for every block of rows. Products
    are of a chunk's rows, so that larger blocks give the same to the last bit.
    """
    if features is None:
        return read_rows(part.matrix("similarities"))
    own_hash = part.spec.get("train_features")
    check_same("training features", own_hash, features.content_hash, features)
    solved = part.matrix("solved_targets")
    solved = solved[:] if in_memory else solved
    phi = read_rows(features.matrix("features"), normalize=normalize)

    def products(start: int, stop: int) -> np.ndarray:
        rows, of_all = phi(start, stop), solved[:]
        values = np.empty((len(rows), of_all.shape[1]))
        for i in range(0, len(rows), CHUNK_ROWS):
            values[i : i + CHUNK_ROWS] = similarities(rows[i : i + CHUNK_ROWS], of_all)
        return values

    return products


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


def normal_weights(train: Artifact, curvature_power: float | None) -> np.ndarray:
    """Return W's diagonal (n,), float64: ones, or a power of the curvature of the samples' loss."""
    if curvature_power is None:
        return np.ones(len(train.vector("sample_ids")))
    if not train.has("curvature"):
        raise InputError(
            f"{train.path}: training samples weighted by `curvature` must come with the curvature "
            f"of their loss. The model output {train.spec['model_output']} has none; set "
            "scoring.weighting to plain.",
            code="stages.no_curvature",
        )
    return train.vector("curvature").astype(np.float64) ** curvature_power


@dataclass(frozen=True, slots=True)
class Damped:
    """A checkpoint's normal matrix with the damping of its scores.

    Attributes:
        matrix: N, shape (k, k), float64.
        ridge: damping * mean_i w_i |phi_i|^2, which is added to N's diagonal.
        ends: Smallest and largest eigenvalue of N.
        norm: ||B||, None where scores are not divided by it.
    """

    matrix: np.ndarray
    ridge: float
    ends: tuple[float, float]
    norm: float | None

    @classmethod
    def read(cls, file: Artifact, train: Artifact, spec: ScoresSpec) -> Self:
        """Return the normal matrix, which must be made of these features and have ||B|| above 0."""
        own = spec.of_normal_matrix()
        expected = {f.name: getattr(own, f.name) for f in fields(NormalSpec)}
        expected |= {"features": train.content_hash}
        stored = {key: file.spec.get(key) for key in expected}
        check_same("features", expected, stored, file)
        ridge = spec.damping * file.scalar("mean_squared_norm")
        norm = None
        if spec.norm_power is not None:
            products = file.matrix("norm_products")[:]
            norm = train_norm(file.vector("eigenvalues"), products, ridge)
        ends = file.scalar("smallest_eigenvalue"), file.scalar("largest_eigenvalue")
        return cls(file.matrix("normal_matrix")[:], ridge, ends, norm)


def write_samples(writer: Writer, train: Artifact, targets: Artifact, norm: float | None) -> None:
    """Write ids and what the checkpoint makes of every sample, the loss weights, and ||B||."""
    writer.vector("loss_weights", train.vector("loss_weights"))
    if norm is not None:
        writer.scalar("train_norm", norm)
    for side, file in (("train", train), ("target", targets)):
        writer.vector(f"{side}_ids", file.vector("sample_ids"))
        for key in PER_SAMPLE:
            writer.vector(f"{side}_{key}", file.vector(key))


def score_rows(
    parts: Sequence[Artifact], similarities: Sequence[ReadRows], spec: ScoresSpec
) -> ReadRows:
    """Return how to get rows of the scores of all checkpoints, from rows of each A_c."""
    assert spec.loss_weight_power is not None
    combine, power = Combine(spec.combine), spec.loss_weight_power
    norms = [part.scalar("train_norm") if spec.norm_power is not None else 1.0 for part in parts]

    def terms(start: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
        for part, read, norm in zip(parts, similarities, norms, strict=True):
            yield read(start, stop), powered(part.vector("loss_weights", start, stop), power), norm

    return lambda start, stop: combined(terms(start, stop), combine)


def self_influences(
    features: Sequence[Path], normal_matrices: Sequence[Path], spec: ScoresSpec, memory_mb: int
) -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    """Return the size of A_c[i, i] Q_c[i] of every training sample i, averaged like a score.

    The sign is left out, because it is that of Q: no training sample harms itself. Predictions and
    outputs are those of the last checkpoint of every run. There are features and a normal matrix
    for each checkpoint. Returns columns id, label, prediction, output and self_influence; loss
    weights averaged over ends of runs, shape (n,); and a file's spec.

    Source: Koh and Liang, "Understanding Black-box Predictions via Influence Functions", ICML 2017,
        section 5.4 (self-influence); docs/explanation/scores.md, "What a score says".
    """
    assert spec.loss_weight_power is not None
    similarities, loss_weights, norms = [], [], []
    with ExitStack() as stack:
        files = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        for file, path, checkpoint in zip(files, normal_matrices, spec.checkpoints, strict=True):
            own = spec.under(checkpoint)
            check_made_for(file, own.of_train())
            own_ids = file.ids("sample_ids")
            check_same("training samples", files[0].ids("sample_ids"), own_ids, file)
            with open_artifact(path, NORMAL_MATRIX) as matrix:
                damped = Damped.read(matrix, file, own)
            diagonal = _self_similarities(file, damped, memory_mb, normalize=spec.normalize)
            similarities.append(diagonal[:, None])
            norms.append(damped.norm or 1.0)
            loss_weights.append(file.vector("loss_weights"))
        powers = [powered(weights, spec.loss_weight_power) for weights in loss_weights]
        parts = zip(similarities, powers, norms, strict=True)
        mean = np.abs(combined(parts, Combine(spec.combine))[:, 0])
        ends = [files[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        predictions = np.stack([file.vector("predictions") for file in ends])
        is_class = predictions.dtype.kind != "f"
        labels = files[0].vector("labels")
        outputs = np.stack([file.vector("outputs") for file in ends])
        common = most_frequent(predictions, labels, outputs) if is_class else predictions.mean(0)
        columns = {
            "id": files[0].ids("sample_ids"),
            "label": labels,
            "prediction": common,
            "output": outputs.mean(axis=0, dtype=np.float64),
            "self_influence": mean,
        }
        projection = {k: v for k, v in files[0].spec["projection"].items() if k != "stream"}
        mean_weights = np.stack([file.vector("loss_weights") for file in ends]).mean(
            axis=0, dtype=np.float64
        )
    return columns, mean_weights, spec.as_dict() | {"projection": projection}


def _self_similarities(
    train: Artifact, damped: Damped, memory_mb: int, *, normalize: bool
) -> np.ndarray:
    """Return A_c[i, i] of every training sample, shape (n,)."""
    factor = damped_factor(damped.matrix, damped.ridge, damped.ends)
    values = train.matrix("features")
    diagonal = np.empty(len(values))
    block = scores_need(values.shape[1], 1).rows(memory_mb)
    for start, stop in blocks_with_progress(len(values), block, "training samples"):
        rows = values[start:stop]
        diagonal[start:stop] = damped_squares(factor, rows)
        if normalize:
            # As a training sample it has length 1; as its own target it is as it is.
            lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
            diagonal[start:stop] /= np.where(lengths > 0, lengths, 1)
    return diagonal


@dataclass(frozen=True, slots=True)
class Retrained:
    """What retrained models say of some targets: f and predictions, shape (models, m)."""

    outputs: np.ndarray
    predictions: np.ndarray
    file: Artifact

    @classmethod
    def read(
        cls, path: Path, target_ids: Sequence[Any], spec: RetrainedSpec, rule: str, **more: Any
    ) -> Self:
        """Return what a rule made for ``spec`` and ``more``; other files are refused."""
        with open_artifact(path, replace(RETRAINED, rule=rule)) as file:
            check_retrained(file, spec, **more)
            place = {target: i for i, target in enumerate(file.columns("outputs"))}
            columns = [place[target] for target in target_ids]
            outputs = file.matrix("outputs")[:][:, columns]
            predictions = file.matrix("predictions")[:][:, columns]
            return cls(outputs, predictions, file)

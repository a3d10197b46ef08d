"""Compute one checkpoint's contribution to the scores from stored features or a stored Gramian."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.linalg

from trak_core.artifacts import (
    FEATURES,
    NORMAL_MATRIX,
    Artifact,
    Rows,
    check_made_for,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.score_formulas import combined, most_frequent, powered, unit_rows
from trak_core.attribution.solve import (
    DampedGramian,
    DampedMatrix,
    Spectrum,
    inverse_lengths,
    mean_squared_norm,
    train_norm,
    weighted_gramians,
)
from trak_core.config.memory_needs import CHUNK_ROWS, normal_matrix_need, scores_need
from trak_core.errors import InputError
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import Combine, NormalSpec, ScoresSpec

# A function (start, stop) that returns rows ``start`` to ``stop - 1`` of a matrix.
ReadRows = Callable[[int, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The data of one checkpoint from which scores are computed.

    In a run of the pipeline, a file contains the same data (see ``Artifact``).

    ``rows`` returns rows of A = Phi (N + ridge I)^-1 T^T (see ``Scorer.score``). ``vectors`` are
    the ``loss_weights`` of training samples, shape (n,), and the ``ids``, ``labels``, ``outputs``
    and ``predictions`` of training samples and targets, with names such as ``train_labels``.
    ``norm`` is the norm by which scores are divided, or 1.
    """

    rows: ReadRows
    vectors: Mapping[str, np.ndarray]
    norm: float

    def vector(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.vectors[key][start:stop]

    def scalar(self, key: str) -> float:
        assert key == "train_norm"
        return self.norm


Part = Artifact | MemoryPart


def read_rows(
    values: Rows | np.ndarray, *, normalize: bool = False, first: int | None = None
) -> ReadRows:
    """Return a function that reads rows of a matrix and, if ``normalize``, divides by their norms.

    If ``first`` is given, only the first ``first`` columns are read.
    """
    if not normalize:
        return lambda start, stop: values[start:stop, :first]
    return lambda start, stop: unit_rows(values[start:stop, :first])


def similarity_rows(phi: ReadRows, solved: Rows | np.ndarray) -> ReadRows:
    """Return a function that computes rows of A = Phi X, where Phi (n, k) are training features.

    ``phi`` reads rows of Phi. ``solved`` is X = (N + ridge I)^-1 T^T, shape (k, m), where N is the
    normal matrix and T are the features of targets. If X is in a file, it is read again for every
    block. Products are computed for ``CHUNK_ROWS`` rows at a time, so that a row's result is
    bitwise the same in every block that starts at a multiple of ``CHUNK_ROWS``.

    Source: Park et al., "TRAK", ICML 2023, equation 16.
    """

    def products(start: int, stop: int) -> np.ndarray:
        rows, of_all = phi(start, stop), solved[:]
        values = np.empty((len(rows), of_all.shape[1]))
        for i in range(0, len(rows), CHUNK_ROWS):
            values[i : i + CHUNK_ROWS] = rows[i : i + CHUNK_ROWS].astype(np.float64) @ of_all
        return values

    return products


def score_rows(parts: Sequence[Part], similarity: Sequence[ReadRows], spec: ScoresSpec) -> ReadRows:
    """Return a function that computes rows of the scores, averaged over checkpoints.

    ``similarity`` contains, for each checkpoint, a function that returns rows of the matrix A (see
    ``MemoryPart``).
    """
    assert spec.loss_weight_power is not None
    combine, power = Combine(spec.combine), spec.loss_weight_power
    norms = [part.scalar("train_norm") if spec.norm_power is not None else 1.0 for part in parts]

    def addends(start: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
        for part, read, norm in zip(parts, similarity, norms, strict=True):
            yield read(start, stop), powered(part.vector("loss_weights", start, stop), power), norm

    return lambda start, stop: combined(addends(start, stop), combine)


def normal_weights(train: Artifact, curvature_power: float | None) -> np.ndarray:
    """Return the weights of training samples in the normal matrix, shape (n,), float64.

    A weight is the curvature of the sample's loss to the power ``curvature_power``. All weights are
    1 if the power is None.
    """
    if curvature_power is None:
        return np.ones(len(train.vector("sample_ids")))
    if not train.has("curvature"):
        raise InputError(
            f"{train.path}: `weighting: curvature` needs a model output that defines the curvature "
            f"of the training loss. {train.spec['model_output']} does not define it. Set "
            "scoring.weighting to plain.",
            code="stages.no_curvature",
        )
    return train.vector("curvature").astype(np.float64) ** curvature_power


def write_normal_matrix(
    path: Path, train: Artifact, spec: NormalSpec, *, code: str, memory_mb: int
) -> None:
    """Write the normal matrix N = Phi^T W Phi of features Phi (n, k), with diagonal weights W.

    With ``label_draws``, N is copied from the file of features (see ``SampledNormal``). The written
    file also contains the smallest and largest eigenvalue of N, and the mean of w_i |phi_i|^2 over
    samples i, from which the ridge is computed.

    If ``spec.norm_power`` is set, scores will be divided by a norm. The file then also contains all
    eigenvalues and the result of ``Spectrum.norm_products``, from which this norm can be computed
    for any damping. If 2n <= k, only the n largest eigenvalues are written, because the others are
    0.
    """
    check_made_for(train, spec.features)
    values = train.matrix("features")
    n_rows, proj_dim = values.shape
    rows = read_rows(values, normalize=spec.normalize)
    weights = [normal_weights(train, spec.curvature_power)]
    if spec.norm_power is not None:
        weights.append(powered(train.vector("loss_weights"), spec.norm_power) ** 2)
        if (weights[0] != 1).any():
            weights.append(np.ones(n_rows))
    block = normal_matrix_need(proj_dim, divides=spec.norm_power is not None).rows(memory_mb)

    draws = spec.features.label_draws
    is_compact = 2 * n_rows <= proj_dim and not draws  # For larger n, this would need more memory.
    summed = weights[:1] if is_compact else weights

    def blocks() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        for start, stop in blocks_with_progress(n_rows, block, "samples"):
            yield rows(start, stop), [own[start:stop] for own in summed]

    gramians = weighted_gramians(blocks())
    matrix = decomposed = train.matrix("sampled_normal")[:] if draws else gramians[0]
    if is_compact:
        # In the QR decomposition Phi^T = U R, the rows of R^T have the same inner products as the
        # rows of Phi, but only n columns. Therefore R W R^T has the nonzero eigenvalues of N,
        # and yields the same norm of scores. The eigenvalues of R W R^T take O(n^3) operations
        # instead of O(k^3).
        upper: Any = np.linalg.qr(rows(0, n_rows).T.astype(np.float64), mode="r")
        gramians = weighted_gramians([(upper.T, weights)])
        decomposed = gramians[0]
    own = {key: value for key, value in spec.as_dict().items() if key not in train.spec}
    file_spec = {**train.spec, **own, "features": train.content_hash}
    provenance = software(code, "cpu", "numpy", "scipy")
    with create(path, NORMAL_MATRIX, file_spec, provenance, weighting=spec.weighting) as writer:
        names = range(proj_dim)
        writer.matrix("normal_matrix", names, names, dtype=np.float64)[:] = matrix
        writer.scalar("mean_squared_norm", mean_squared_norm(matrix, n_rows))
        writer.scalar("n_train", n_rows)
        if spec.norm_power is None:
            eigenvalues = scipy.linalg.eigvalsh(decomposed)
        else:
            spectrum = Spectrum.decompose(decomposed)
            eigenvalues = spectrum.eigenvalues
            # The second argument is Phi^T Phi. If all weights in W are 1, it equals Phi^T W Phi,
            # which has already been computed.
            products = spectrum.norm_products(gramians[1], gramians[2 if len(weights) > 2 else 0])
            names = range(len(products))
            writer.vector("eigenvalues", eigenvalues)
            writer.matrix("norm_products", names, names, dtype=np.float64)[:] = products
        smallest = 0.0 if is_compact else float(eigenvalues[0])
        largest = float(eigenvalues[-1])
        writer.scalar("smallest_eigenvalue", smallest)
        writer.scalar("largest_eigenvalue", largest)
        # The floor keeps the condition number of a singular matrix finite, at 1 / eps.
        floor = largest * np.finfo(np.float64).eps
        writer.scalar("condition_number", largest / max(smallest, floor) if largest > 0 else 1.0)


def _normal_matrix_specs(
    file: Artifact, train: Artifact, spec: NormalSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that the file of a normal matrix must contain, and the stored ones."""
    expected = {f.name: getattr(spec, f.name) for f in fields(NormalSpec)}
    expected |= {"features": train.content_hash}
    return expected, {key: file.spec.get(key) for key in expected}


def is_normal_matrix_of(path: Path, train: Artifact, spec: NormalSpec) -> bool:
    """Return whether ``path`` is a file with the normal matrix of the features in ``train``."""
    if not path.exists():
        return False
    with open_artifact(path, NORMAL_MATRIX) as file:
        expected, stored = _normal_matrix_specs(file, train, spec)
        return expected == stored


def read_normal_matrix(
    file: Artifact, train: Artifact, spec: ScoresSpec
) -> tuple[DampedMatrix, float | None]:
    """Return the factorized N + ridge I of a checkpoint, and the norm by which to divide scores.

    N is the normal matrix in ``file``, and must have been computed from the features in ``train``.
    The ridge is the damping times the weighted mean squared norm of the features. If scores are not
    divided by a norm, the norm is None.
    """
    check_same("features", *_normal_matrix_specs(file, train, spec), file)
    ridge, norm = spec.damping * file.scalar("mean_squared_norm"), None
    if spec.norm_power is not None:
        products = file.matrix("norm_products")[:]
        norm = train_norm(file.vector("eigenvalues"), products, ridge)
    ends = file.scalar("smallest_eigenvalue"), file.scalar("largest_eigenvalue")
    return DampedMatrix.factorize(file.matrix("normal_matrix")[:], ridge, ends), norm


def stored_products(file: Artifact) -> np.ndarray:
    """Return the matrix of inner products in a file, with the rows of drawn labels at the end."""
    gramian = file.matrix("gramian")[:]
    if not file.has("drawn"):
        return gramian
    drawn, m = file.matrix("drawn")[:], gramian.shape[1]
    if drawn.shape[1] > m:  # Products of drawn rows with each other are stored, too.
        gramian = np.hstack([gramian, drawn[:, :m].T])
    return np.vstack([gramian, drawn])


@dataclass(frozen=True, slots=True)
class DampedGradients:
    """The factorized damped Gramian of one checkpoint's n training samples, for exact scores.

    The Gramian is R R^T. The first n rows of R are the training samples' gradients of the model
    output. With S ``label_draws``, gradients for the drawn labels follow. The normal matrix R^T W R
    is then computed from the drawn labels only: the diagonal of W is 1 / S for these gradients, and
    0 for gradients of the model output.

    The rows of R are multiplied by ``factors``, which are 1 or, with ``normalize``, the inverse
    norms of the rows. ``norm`` is the norm by which scores are divided, or None.
    """

    damped: DampedGramian
    factors: np.ndarray
    n_samples: int
    norm: float | None

    @classmethod
    def read(cls, train: Artifact, spec: ScoresSpec) -> Self:
        """Return the factorization of a stored Gramian of the training samples."""
        weights, gramian = normal_weights(train, spec.curvature_power), stored_products(train)
        n, draws = len(weights), spec.features.label_draws
        if draws:
            weights = np.repeat([0.0, 1 / draws], [n, n * draws])
        factors = inverse_lengths(gramian) if spec.normalize else np.ones((len(gramian), 1))
        gramian *= factors
        gramian *= factors.T
        # ``factorize`` averages over n (1 + draws) rows, but damping refers to a mean over n rows.
        damped = DampedGramian.factorize(gramian, weights, spec.damping * (1 + draws))
        norm = None
        if spec.norm_power is not None:
            norm = damped.train_norm(powered(train.vector("loss_weights"), spec.norm_power))
        return cls(damped, factors, n, norm)

    def similarities(self, cross: np.ndarray) -> np.ndarray:
        """Return A = J (R^T W R + ridge I)^-1 J_t^T for n training samples and m targets.

        The rows of J and J_t are the gradients of training samples and targets. ``cross`` is
        R J_t^T, as computed by ``inner_products``, and is overwritten.
        """
        cross *= self.factors
        return self.damped.similarities(cross)[: self.n_samples]


def training_table(files: Sequence[Artifact]) -> dict[str, Any]:
    """Return the columns ``id``, ``label``, ``prediction`` and ``output`` of training samples.

    Each of ``files`` contains the features or the Gramian of one checkpoint. Outputs are means over
    checkpoints. A prediction is the class that most checkpoints predict or, if predictions are not
    classes, their mean. Each column has shape (n,).
    """
    labels = files[0].vector("labels")
    predictions, outputs = (
        np.stack([file.vector(key) for file in files]) for key in ("predictions", "outputs")
    )
    is_class = predictions.dtype.kind != "f"
    common = most_frequent(predictions, labels, outputs) if is_class else predictions.mean(0)
    return {
        "id": files[0].ids("sample_ids"),
        "label": labels,
        "prediction": common,
        "output": outputs.mean(axis=0, dtype=np.float64),
    }


def self_influences(
    features: Sequence[Path], normal_matrices: Sequence[Path], spec: ScoresSpec, memory_mb: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the absolute value of every training sample's score for itself.

    The score of sample i for itself is A_c[i, i] Q_c[i]^power, averaged over checkpoints c like all
    other scores, where Q_c are the loss weights and A_c = Phi_c (N_c + ridge_c I)^-1 Phi_c^T.
    ``features`` and ``normal_matrices`` contain one file for each checkpoint of ``spec``.

    Returns:
        The columns of a table, shape (n,) each: ``self_influence`` and those of ``training_table``
        for the last checkpoint of each run; and the settings to store with the table.

    Source: Koh and Liang, "Understanding Black-box Predictions via Influence Functions", ICML 2017,
        section 5.4.
    """
    assert spec.loss_weight_power is not None
    addends = []
    with ExitStack() as stack:
        files = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        for file, path, checkpoint in zip(files, normal_matrices, spec.checkpoints, strict=True):
            own = spec.under(checkpoint)
            check_made_for(file, own.of_train())
            check_same("training samples", files[0].ids("sample_ids"), file.ids("sample_ids"), file)
            with open_artifact(path, NORMAL_MATRIX) as matrix:
                damped, norm = read_normal_matrix(matrix, file, own)
            values = file.matrix("features")
            diagonal = np.empty((len(values), 1))
            block = scores_need(values.shape[1], 1).rows(memory_mb)
            for start, stop in blocks_with_progress(len(values), block, "training samples"):
                rows = values[start:stop].astype(np.float64)
                # With `normalize`, a sample's features are divided by their norm if it is a
                # training sample, but not if it is a target. Therefore phi_i^T (N + ridge I)^-1
                # phi_i is divided by |phi_i| only once.
                lengths = np.linalg.norm(rows, axis=1) if spec.normalize else np.ones(len(rows))
                diagonal[start:stop, 0] = damped.squares(rows) / np.where(lengths > 0, lengths, 1)
            weights = powered(file.vector("loss_weights"), spec.loss_weight_power)
            addends.append((diagonal, weights, norm or 1.0))
        mean = np.abs(combined(addends, Combine(spec.combine))[:, 0])
        ends = [files[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        columns = {**training_table(ends), "self_influence": mean}
        projection = {k: v for k, v in files[0].spec["projection"].items() if k != "stream"}
    return columns, spec.as_dict() | {"projection": projection}

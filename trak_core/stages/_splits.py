"""What scores take from a checkpoint's files of training samples and targets."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from trak_core.artifacts import NORMAL_MATRIX, Artifact, Rows, Writer, check_same
from trak_core.errors import InputError
from trak_core.scoring.directions import unit_rows
from trak_core.scoring.solve import train_norm
from trak_core.spec import NormalSpec, ScoresSpec

_PER_SAMPLE = ("labels", "outputs", "predictions")


ReadRows = Callable[[int, int], np.ndarray]


def rows_of(values: Rows, *, normalize: bool = False, first: int | None = None) -> ReadRows:
    """Return how to get rows of Phi_c, or of another matrix.

    Args:
        values: As it is stored.
        normalize: Whether rows are divided by their lengths.
        first: Only so many columns; None for all.
    """
    if not normalize:
        return lambda start, stop: values[start:stop, :first]
    return lambda start, stop: unit_rows(values[start:stop, :first])


def normal_weights(train: Artifact, curvature_power: float | None) -> np.ndarray:
    """Return the diagonal of W: ones, or a power of the curvature of the training samples' loss.

    Args:
        train: The file of the training samples.
        curvature_power: None for ones.

    Returns:
        Shape (n,), float64.

    Raises:
        InputError: If the file holds no curvature where that is asked for.
    """
    if curvature_power is None:
        return np.ones(len(train.vector("sample_ids")))
    if not train.has("curvature"):
        raise InputError(
            f"{train.path}: training samples weighted by `curvature` must come with the curvature "
            f"of their loss. The model output {train.spec['model_output']} has none; set "
            "scoring.weighting to plain."
        )
    return train.vector("curvature").astype(np.float64) ** curvature_power


@dataclass(frozen=True, slots=True)
class Damped:
    """A checkpoint's normal matrix with the damping of its scores.

    Attributes:
        matrix: N, shape (k, k), float64.
        lambda_: damping * mean_i w_i |phi_i|^2.
        ends: Smallest and largest eigenvalue of N.
        norm: N_c, None where scores are not divided by it.
    """

    matrix: np.ndarray
    lambda_: float
    ends: tuple[float, float]
    norm: float | None

    @classmethod
    def of(cls, file: Artifact, train: Artifact, spec: ScoresSpec) -> Self:
        """Read it.

        Args:
            file: The normal matrix.
            train: The training features that it must be made of.
            spec: Of one checkpoint's scores.

        Returns:
            What the checkpoint's scores are solved with.

        Raises:
            InputError: If it is not what it must be, or if N_c is not above 0.
        """
        decided = spec.of_normal_matrix()
        own = {f.name: getattr(decided, f.name) for f in fields(NormalSpec)}
        wanted = own | {"features": train.content_hash}
        found = {key: file.spec.get(key) for key in wanted}
        check_same("features", wanted, found, file.path, NORMAL_MATRIX.rule)
        lambda_ = spec.damping * file.scalar("mean_squared_norm")
        norm = None
        if spec.norm_power is not None:
            products = file.matrix("norm_products")[:]
            norm = train_norm(file.vector("eigenvalues"), products, lambda_)
        ends = file.scalar("smallest_eigenvalue"), file.scalar("largest_eigenvalue")
        return cls(file.matrix("normal_matrix")[:], lambda_, ends, norm)


def write_samples(writer: Writer, train: Artifact, targets: Artifact, norm: float | None) -> None:
    """Write ids and what the checkpoint makes of every sample, the loss weights, and N_c."""
    writer.vector("loss_weights", train.vector("loss_weights"))
    if norm is not None:
        writer.scalar("train_norm", norm)
    for side, file in (("train", train), ("target", targets)):
        writer.vector(f"{side}_ids", file.ids("sample_ids"))
        for key in _PER_SAMPLE:
            writer.vector(f"{side}_{key}", file.vector(key))


def norm_of(part: Artifact, spec: ScoresSpec) -> float:
    """Return N_c of one checkpoint's scores; 1 where they are not divided by it."""
    return part.scalar("train_norm") if spec.norm_power is not None else 1.0

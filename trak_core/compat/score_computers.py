"""TRAK 0.3.2's formula between features and scores, summed in float64 and solved in float64."""

import logging
import warnings
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trak_core.compat._vectors import get_matrix_mult
from trak_core.errors import InputError

# Rows of float32 leave eigenvalues of about 1e-14 of the largest where there should be none.
_MAX_CONDITION = 1e13


def inverse_or_pseudo_inverse(matrix: Tensor, max_rank: int) -> tuple[Tensor, int]:
    """Return the inverse of a matrix, or where it has none the pseudo-inverse, and the rank.

    A direction counts if its eigenvalue is above 1e-13 of the largest; the others are left out. For
    G^T G, G times the pseudo-inverse is the limit of G inv(G^T G + lambda I) for lambda to 0.

    Args:
        matrix: Symmetric, positive semi-definite, shape (k, k), float64.
        max_rank: Of no more directions than these; k if nothing is known.

    Returns:
        Shape (k, k), float64; how many directions count.

    Raises:
        InputError: If the matrix is not finite.
    """
    k = len(matrix)
    if not matrix.isfinite().all():
        raise InputError(
            "Features must be finite, and their products too. Found NaN or infinity in G^T G. Look "
            "for bad values in the samples and in the checkpoint."
        )
    if max_rank >= k:
        inverse, info = torch.linalg.inv_ex(matrix)
        condition = float(torch.linalg.norm(matrix) * torch.linalg.norm(inverse))
        if not info.item() and condition < _MAX_CONDITION:
            return inverse, k
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    rank = min(max_rank, int((eigenvalues > eigenvalues[-1] / _MAX_CONDITION).sum()))
    values, directions = eigenvalues[k - rank :], vectors[:, k - rank :]
    return (directions / values) @ directions.T, rank


class AbstractScoreComputer(ABC):
    """Three steps: the matrix G^T G, the features G K, the scores (G K) T^T.

    Attributes:
        max_rank: What the rank of G^T G cannot exceed, set by TRAKer: the number of training
            samples or of parameters. Rows rounded to float16 would seem to have more.
    """

    max_rank: int | None = None

    @abstractmethod
    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        """Keep the arguments; ``dtype`` is how arrays are stored, not how sums are made."""
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return G^T G of projected gradients (n, k), shape (k, k)."""

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return G K with K = inv(G^T G + lambda I) / mean |.|, shape (n, k)."""

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features (n, k) @ target_grads (m, k)^T to the accumulator (n, m)."""


class BasicScoreComputer(AbstractScoreComputer):
    """The steps, ``CUDA_MAX_DIM_SIZE`` rows at a time."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device,
        CUDA_MAX_DIM_SIZE: int = 20_000,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        """Take lambda, added to the diagonal of G^T G."""
        super().__init__(dtype, device)
        self.CUDA_MAX_DIM_SIZE = CUDA_MAX_DIM_SIZE
        self.lambda_reg = lambda_reg
        self.logger = logging.getLogger("ScoreComputer")
        self.logger.setLevel(logging_level)

    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return G^T G, float64, shape (k, k)."""
        k = grads.shape[1]
        total = torch.zeros(k, k, dtype=torch.float64, device=self.device)
        for block in torch.split(grads, self.CUDA_MAX_DIM_SIZE):
            rows = block.to(self.device, torch.float64)
            total += rows.T @ rows
        return total

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return G K, float32, shape (n, k).

        Where G^T G + lambda I has no inverse to working precision, as with lambda 0 and fewer rows
        than columns, K is made of its pseudo-inverse, and a warning says what to set.
        """
        k, xtx = len(xtx), xtx.double()
        identity = torch.eye(k, dtype=torch.float64, device=xtx.device)
        max_rank = k if self.lambda_reg > 0 or self.max_rank is None else min(k, self.max_rank)
        inverse, rank = inverse_or_pseudo_inverse(xtx + self.lambda_reg * identity, max_rank)
        if rank < k:
            usual = 2 * float(xtx.trace()) / len(grads)
            warnings.warn(
                f"G^T G + lambda I has no inverse: its rank is {rank}, with proj_dim {k}, "
                f"{len(grads)} training samples and lambda_reg {self.lambda_reg:g}. Its "
                "pseudo-inverse is taken, the limit of lambda to 0, which magnifies noise. Set "
                f"lambda_reg above 0, {usual:.1g} say (twice the mean squared norm of a projected "
                "gradient), or a proj_dim well below the number of training samples and of "
                "parameters.",
                stacklevel=4,
            )
        if rank:
            inverse /= inverse.abs().mean()
        # Small eigenvalues of a matrix without inverse make entries too fine for float32.
        weights = inverse.float() if rank == k else inverse
        blocks = torch.split(grads, self.CUDA_MAX_DIM_SIZE)
        products = [(block.to(self.device, weights.dtype) @ weights).float() for block in blocks]
        return torch.cat(products)

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add the scores to a float32 accumulator on the CPU, block of rows by block of rows."""
        targets = target_grads.to(self.device).float()
        first = 0
        for block in torch.split(features, self.CUDA_MAX_DIM_SIZE):
            scores = get_matrix_mult(block.to(self.device).float(), targets)
            accumulator[first : first + len(block)] += scores.detach().to(accumulator.device)
            first += len(block)


class BasicSingleBlockScoreComputer(BasicScoreComputer):
    """The same: how many rows are taken at once changes no number."""

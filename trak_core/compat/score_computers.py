"""TRAK 0.3.2's formula between features and scores, summed in float64 and solved in float64."""

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trak_core.compat._vectors import get_matrix_mult
from trak_core.errors import InputError

# Rows of float32 leave eigenvalues of about 1e-14 of the largest where there should be none.
_MAX_CONDITION = 1e13


class AbstractScoreComputer(ABC):
    """Three steps: the matrix G^T G, the features G K, the scores (G K) T^T."""

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

        Raises:
            InputError: If the matrix is singular to working precision.
        """
        matrix = xtx.double() + self.lambda_reg * torch.eye(
            len(xtx), dtype=torch.float64, device=xtx.device
        )
        inverse, info = torch.linalg.inv_ex(matrix)
        condition = float(torch.linalg.norm(matrix) * torch.linalg.norm(inverse))
        if info.item() or not condition < _MAX_CONDITION:
            raise InputError(
                "G^T G + lambda I must have an inverse. Found a condition number of "
                f"{condition:.1e} with lambda_reg = {self.lambda_reg:g}, proj_dim = {len(xtx)} and "
                f"{len(grads)} training samples. Take a proj_dim below the number of training "
                "samples, or lambda_reg above 0."
            )
        inverse /= inverse.abs().mean()
        weights = inverse.float()
        blocks = torch.split(grads, self.CUDA_MAX_DIM_SIZE)
        return torch.cat([block.to(self.device).float() @ weights for block in blocks])

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add the scores to a float32 accumulator on the CPU, block of rows by block of rows."""
        targets = target_grads.to(self.device).float()
        first = 0
        for block in torch.split(features, self.CUDA_MAX_DIM_SIZE):
            scores = get_matrix_mult(block.to(self.device).float(), targets)
            accumulator[first : first + len(block)] += scores.detach().to(accumulator.device)
            first += len(block)


class BasicSingleBlockScoreComputer(BasicScoreComputer):
    """The steps with all rows at once."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        """Take lambda, added to the diagonal of G^T G."""
        super().__init__(dtype, device, 2**62, logging_level=logging_level, lambda_reg=lambda_reg)

"""Compute scores from projected gradients by the formula of TRAK 0.3.2.

    K_c    = inv(G_c^T G_c + lambda I),  then K_c /= mean(|K_c|)
    scores = mean_c(G_c K_c T_c^T) * mean_c(Q_c)

Each checkpoint c has projected training gradients G_c (n, k), projected target gradients T_c (m, k)
and loss weights Q_c (n, 1). inv is the inverse or, for a singular matrix, the pseudo-inverse.
G_c^T G_c and its inverse are computed in float64.

Source: the package ``trak``, version 0.3.2; Park et al., "TRAK", ICML 2023, equations 16 and 17.
"""

import logging
import warnings
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from trak_core.attribution.solve import (
    inverse_or_pseudo_inverse,
    mean_squared_norm,
    weighted_gramians,
)


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Return the size of the product ``features @ target_grads.T`` in bytes."""
    return len(features) * len(target_grads) * target_dtype.itemsize


def get_free_memory(device: torch.device) -> int:
    """Return the number of bytes that torch has reserved on a CUDA device but does not use."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def get_matrix_mult_standard(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype
) -> Tensor:
    """Return ``features @ target_grads.T`` in ``target_dtype``, with sums in at least float32."""
    wide = torch.promote_types(features.dtype, torch.float32)
    return (features.to(wide) @ target_grads.to(wide).T).to(target_dtype)


def get_matrix_mult_blockwise(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int
) -> Tensor:
    """Return ``features @ target_grads.T`` on the CPU, after computing it on a GPU if possible.

    ``features`` are moved to the GPU in blocks of ``bs`` rows.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns, rows = target_grads.to(device), features.split(bs)
    return torch.cat([
        get_matrix_mult_standard(block.to(device), columns, target_dtype).cpu() for block in rows
    ])


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Return ``features @ target_grads.T``, shape (n, m), for shapes (n, k) and (m, k).

    The product is on the CPU if ``use_blockwise`` is true, or if the GPU has too little memory.
    """
    dtype, device = target_dtype or features.dtype, features.device
    needed = get_output_memory(features, target_grads, dtype)
    if use_blockwise or (device.type == "cuda" and needed >= get_free_memory(device)):
        return get_matrix_mult_blockwise(features, target_grads, dtype, batch_size)
    return get_matrix_mult_standard(features, target_grads, dtype)


class AbstractScoreComputer(ABC):
    """The base class of objects that compute scores from projected gradients.

    With projected gradients G of training samples and T of targets, the features are G K, and the
    scores are (G K) T^T (see ``get_x_xtx_inv`` for K). TRAKer sets ``max_rank`` to the number of
    training samples or of parameters, whichever is smaller. The exact rank of G cannot be larger,
    but rounding its entries can increase it.
    """

    max_rank: int | None = None

    @abstractmethod
    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        self.dtype, self.device = dtype, device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return G^T G, shape (k, k), float64, for the projected gradients G = ``grads``."""

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return the features G K, shape (n, k), float32.

        G is ``grads``, and K = inv(G^T G + lambda I), divided by the mean of its absolute entries.
        """

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add ``features @ target_grads.T`` to ``accumulator``, shape (n, m), float32."""


class BasicScoreComputer(AbstractScoreComputer):
    """A score computer that processes blocks of ``CUDA_MAX_DIM_SIZE`` rows."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device,
        CUDA_MAX_DIM_SIZE: int = 20_000,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        super().__init__(dtype, device)
        self.CUDA_MAX_DIM_SIZE, self.lambda_reg = CUDA_MAX_DIM_SIZE, lambda_reg

    def get_xtx(self, grads: Tensor) -> Tensor:
        blocks = (block.cpu().numpy() for block in grads.split(self.CUDA_MAX_DIM_SIZE))
        (total,) = weighted_gramians((rows, [np.ones(len(rows))]) for rows in blocks)
        return torch.from_numpy(total).to(self.device)

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        matrix, k = xtx.cpu().numpy().astype(np.float64), len(xtx)
        usual = 2 * mean_squared_norm(matrix, len(grads))
        matrix.flat[:: k + 1] += self.lambda_reg
        max_rank = k if self.lambda_reg > 0 or self.max_rank is None else self.max_rank
        # If the rank is below k, the result is the pseudo-inverse.
        inverse, rank = inverse_or_pseudo_inverse(matrix, max_rank)
        if rank < k:
            warnings.warn(
                f"G^T G + lambda I has no inverse: its rank is {rank}, with proj_dim {k}, "
                f"{len(grads)} training samples and lambda_reg {self.lambda_reg:g}. The pseudo-"
                "inverse, which is used instead, magnifies noise. Set lambda_reg above 0, for "
                f"example {usual:.1g} (twice the mean squared norm of a projected gradient), or "
                "set proj_dim well below the numbers of training samples and of parameters.",
                stacklevel=3,
            )
        inverse /= np.abs(inverse).mean() or 1
        # Products with the pseudo-inverse of a nearly singular matrix need float64.
        weights = torch.from_numpy(inverse).to(torch.float32 if rank == k else torch.float64)
        weights = weights.to(self.device)
        blocks = grads.split(self.CUDA_MAX_DIM_SIZE)
        return torch.cat([(rows.to(weights) @ weights).float() for rows in blocks])

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        targets = target_grads.to(self.device).float()
        blocks = (t.split(self.CUDA_MAX_DIM_SIZE) for t in (features, accumulator))
        for rows, total in zip(*blocks, strict=True):
            total += get_matrix_mult(rows.to(self.device).float(), targets).to(total.device)


class BasicSingleBlockScoreComputer(BasicScoreComputer):
    """The same as ``BasicScoreComputer``, because the size of blocks does not change scores."""

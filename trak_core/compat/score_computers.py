"""Compute TRAK 0.3.2's formula from a store's gradients to scores, with sums and solves in float64.

    K_c    = inv(G_c^T G_c + lambda I),  then K_c /= mean(|K_c|)
    scores = mean_c(G_c K_c T_c^T) * mean_c(Q_c)

over the checkpoints c, with projected training gradients G_c (n, k), target gradients T_c (m, k)
and loss weights Q_c (n, 1); inv is the pseudo-inverse where there is no inverse.

Source: the package ``trak``, version 0.3.2; Park et al., "TRAK", ICML 2023, equations 16 and 17.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from trak_core.compat.checks import check_not_all_zero, stored
from trak_core.compat.savers import AbstractSaver, ModelIDException
from trak_core.errors import InputError, listed

# Rows of float32 leave eigenvalues of about 1e-14 of the largest where there should be none.
_MAX_CONDITION = 1e13


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Return the bytes of ``features @ target_grads.T``."""
    return len(features) * len(target_grads) * target_dtype.itemsize


def get_free_memory(device: torch.device) -> int:
    """Return the bytes that torch has reserved on a CUDA device and not used."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def get_matrix_mult_standard(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype
) -> Tensor:
    """Return ``features @ target_grads.T`` in ``target_dtype``, summed in float32 at least."""
    wide = torch.promote_types(features.dtype, torch.float32)
    return (features.to(wide) @ target_grads.to(wide).T).to(target_dtype)


def get_matrix_mult_blockwise(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int
) -> Tensor:
    """Return the product on the CPU, made ``bs`` rows and columns at a time, by a GPU if any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    output = torch.empty((len(features), len(target_grads)), dtype=target_dtype)
    for i in range(0, len(features), bs):
        rows = features[i : i + bs].to(device)
        for j in range(0, len(target_grads), bs):
            block = get_matrix_mult_standard(
                rows, target_grads[j : j + bs].to(device), target_dtype
            )
            output[i : i + bs, j : j + bs] = block.cpu()
    return output


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Return ``features @ target_grads.T``, shape (n, m), of rows (n, k) and (m, k).

    With ``use_blockwise``, or where the product doesn't fit the GPU, it is made in blocks of
    ``batch_size`` rows and columns and lies on the CPU. Its dtype is ``target_dtype``, or that of
    the features.
    """
    dtype = features.dtype if target_dtype is None else target_dtype
    on_gpu = features.device.type == "cuda"
    too_large = on_gpu and get_output_memory(features, target_grads, dtype) >= get_free_memory(
        features.device
    )
    if use_blockwise or too_large:
        return get_matrix_mult_blockwise(features, target_grads, dtype, batch_size)
    return get_matrix_mult_standard(features, target_grads, dtype)


def inverse_or_pseudo_inverse(matrix: Tensor, max_rank: int) -> tuple[Tensor, int]:
    """Return the inverse of a matrix and its rank, or the pseudo-inverse where there is no inverse.

    The matrix is symmetric, positive semi-definite, (k, k), float64. A direction counts if its
    eigenvalue is above 1e-13 of the largest, and at most ``max_rank`` do. For G^T G, G times the
    pseudo-inverse is the limit of G inv(G^T G + lambda I) for lambda to 0.
    """
    k = len(matrix)
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
        max_rank: The smaller of the numbers of training samples and parameters, set by TRAKer. The
            rank of G^T G cannot exceed it, although rows rounded to float16 seem to have more.
    """

    max_rank: int | None = None

    @abstractmethod
    def __init__(self, dtype: torch.dtype, device: str | torch.device) -> None:
        """Keep the arguments; ``dtype`` is how arrays are stored, not how sums are made."""
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Return G^T G of projected gradients (n, k), shape (k, k), float64."""

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return G K with K = inv(G^T G + lambda I) / mean |.|, shape (n, k)."""

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features (n, k) @ target_grads (m, k)^T to the accumulator (n, m)."""


class BasicScoreComputer(AbstractScoreComputer):
    """The steps, ``CUDA_MAX_DIM_SIZE`` rows at a time.

    Example:
        >>> import torch
        >>> gradients, targets = torch.eye(3, 2), torch.tensor([[2.0, 0.0]])
        >>> computer = BasicScoreComputer(torch.float32, "cpu", lambda_reg=1.0)
        >>> features = computer.get_x_xtx_inv(gradients, computer.get_xtx(gradients))
        >>> scores = torch.zeros(3, 1)
        >>> computer.get_scores(features, targets, accumulator=scores)
        >>> scores.ravel().tolist()
        [4.0, 0.0, 0.0]
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device,
        CUDA_MAX_DIM_SIZE: int = 20_000,
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        super().__init__(dtype, device)
        self.CUDA_MAX_DIM_SIZE = CUDA_MAX_DIM_SIZE
        self.lambda_reg = lambda_reg
        self.logger = logging.getLogger("ScoreComputer")
        self.logger.setLevel(logging_level)

    def get_xtx(self, grads: Tensor) -> Tensor:
        k = grads.shape[1]
        total = torch.zeros(k, k, dtype=torch.float64, device=self.device)
        for block in torch.split(grads, self.CUDA_MAX_DIM_SIZE):
            rows = block.to(self.device, torch.float64)
            total += rows.T @ rows
        return total

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Return G K, float32, shape (n, k).

        G^T G + lambda I has no inverse to working precision where lambda is 0 and rows are fewer
        than columns, for one. The pseudo-inverse takes its place then, and a warning says what to
        set.
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
        """Add the scores to a float32 accumulator on the CPU, a block of rows at a time."""
        targets = target_grads.to(self.device).float()
        blocks = (torch.split(t, self.CUDA_MAX_DIM_SIZE) for t in (features, accumulator))
        for rows, total in zip(*blocks, strict=True):
            total += get_matrix_mult(rows.to(self.device).float(), targets).to(total.device)


class BasicSingleBlockScoreComputer(BasicScoreComputer):
    """The same: the number of rows at a time changes no score."""


def checked_ids(saver: AbstractSaver, model_ids: Iterable[int] | None) -> list[int]:
    """Return the given model ids, which must be in the store, or all that it has."""
    saver.refresh()
    chosen = sorted(saver.model_ids) if model_ids is None else [int(m) for m in model_ids]
    unknown = [m for m in chosen if not saver.is_registered(m)]
    if unknown or not chosen:
        raise ModelIDException(
            f"Model ids must be in {saver.save_dir}, at least one. Found "
            f"{f'no {listed(unknown)}' if unknown else 'none'}; it has "
            f"{listed(sorted(saver.model_ids)) or 'none'}. `load_checkpoint` and `featurize` make "
            "them.",
            code="compat.model_ids",
        )
    return chosen


def finalize_model(
    saver: AbstractSaver,
    score_computer: AbstractScoreComputer,
    model_id: int,
    *,
    lambda_reg: float,
    device: str | torch.device,
    dtype: torch.dtype,
) -> bool:
    """Compute and store G K of one model id; return False if the store has it for this lambda."""
    saver.load_current_store(model_id)
    # Counted again: a killed process may have left its last samples uncounted.
    saver.serialize_current_model_id_metadata()
    state = saver.model_ids[model_id]
    if not state["is_featurized"]:
        missing = np.flatnonzero(np.asarray(saver.current_store["is_featurized"]).ravel() == 0)
        raise ModelIDException(
            f"All training samples must be featurized first. Found {len(missing)} of model id "
            f"{model_id} that are not: {listed(missing.tolist())}. Call `featurize` with them.",
            code="compat.not_featurized",
        )
    if state["is_finalized"] and state.get("lambda_reg") == lambda_reg:
        return False
    if saver.current_store["grads"] is None:
        raise InputError(
            f"Another lambda_reg needs the gradients of model id {model_id}. Found them deleted "
            f"(`del_grads`), and its features finalized with {state.get('lambda_reg')}, not "
            f"{lambda_reg}. Use that lambda_reg, or featurize under another model id.",
            code="compat.no_gradients",
        )
    # A kill from here on must not leave half of the features marked as finished.
    state["is_finalized"] = 0
    saver.serialize_current_model_id_metadata()
    gradients = torch.as_tensor(np.asarray(saver.current_store["grads"]), device=device)
    check_not_all_zero(gradients)
    xtx = score_computer.get_xtx(gradients)
    features = score_computer.get_x_xtx_inv(gradients, xtx)
    where = np.arange(len(features)), "finalized features"
    saver.current_store["features"][:] = stored(features, dtype, *where, may_vanish=True)
    state |= {"is_finalized": 1, "lambda_reg": lambda_reg}
    saver.serialize_current_model_id_metadata()
    return True


def _why_unusable(
    saver: AbstractSaver, model_id: int, exp_name: str, lambda_reg: float
) -> str | None:
    """Open a model id's arrays for an experiment, and say in words why its scores cannot count."""
    if not saver.model_ids[model_id]["is_finalized"]:
        return "its features are not finalized: call `finalize_features`"
    known = saver.model_ids[model_id].get("lambda_reg")
    if known != lambda_reg:
        return (
            f"its features are finalized with lambda_reg {known}, not {lambda_reg}: call "
            "`finalize_features`"
        )
    _open(saver, model_id, exp_name)
    targets = saver.current_store[f"{exp_name}_grads"]
    if targets is None:
        return "its targets are not scored: call `start_scoring_checkpoint` and `score`"
    unscored = np.flatnonzero(np.isnan(targets).any(axis=1))
    if len(unscored):
        return f"its targets {listed(unscored.tolist())} are not scored: call `score` with them"
    return None


def _open(saver: AbstractSaver, model_id: int, exp_name: str) -> None:
    """Open a model id's arrays for reading, and those of an experiment."""
    saver.load_current_store(model_id, mode="r")
    num_targets = saver.experiments[exp_name]["num_targets"]
    saver.load_current_store(model_id, exp_name, num_targets, mode="r")


def usable_ids(
    saver: AbstractSaver,
    exp_name: str,
    model_ids: Iterable[int] | None,
    *,
    lambda_reg: float,
    allow_skip: bool,
) -> list[int]:
    """Return the model ids that count in an experiment, and warn about the others.

    ``allow_skip`` leaves out whatever cannot count. If no model ids are named, those whose features
    are not finalized may be left out.
    """
    chosen = checked_ids(saver, model_ids)
    if exp_name not in saver.experiments:
        raise InputError(
            f"An experiment must be scored first. Found no {exp_name!r}; there are "
            f"{listed(sorted(saver.experiments)) or 'none'}. Call `start_scoring_checkpoint` and "
            "`score`.",
            code="compat.unknown_experiment",
        )
    reasons = {m: _why_unusable(saver, m, exp_name, lambda_reg) for m in chosen}
    missing = {m: reason for m, reason in reasons.items() if reason is not None}
    used = [m for m in chosen if m not in missing]
    text = "; ".join(f"model id {m}: {reason}" for m, reason in missing.items())
    unfinished = all(not saver.model_ids[m]["is_finalized"] for m in missing)
    may_skip = allow_skip or (model_ids is None and unfinished)
    if not used or (missing and not may_skip):
        raise ModelIDException(
            f"Checkpoints that are averaged must be finalized and scored. Found {text}."
            f"{' allow_skip=True leaves them out.' if used else ''}",
            code="compat.unusable",
        )
    if missing:
        warnings.warn(f"Left out of the scores of {exp_name!r}: {text}.", stacklevel=3)
    return used


def average_scores(
    saver: AbstractSaver,
    score_computer: AbstractScoreComputer,
    exp_name: str,
    model_ids: Sequence[int],
    device: str | torch.device,
) -> np.ndarray:
    """Return the scores of finalized and scored model ids, shape (n, m), float32."""
    total, weights = torch.zeros(0), np.zeros(1)
    for model_id in model_ids:
        _open(saver, model_id, exp_name)
        names = "features", f"{exp_name}_grads"
        # Copied: torch has no read-only tensors.
        features, targets = (
            torch.tensor(np.asarray(saver.current_store[name]), device=device) for name in names
        )
        if not len(total):
            total = torch.zeros(len(features), len(targets))
        score_computer.get_scores(features, targets, accumulator=total)
        weights = weights + np.asarray(saver.current_store["out_to_loss"], dtype=np.float64)
    total *= torch.from_numpy((weights / len(model_ids) ** 2).astype(np.float32))
    return total.numpy()

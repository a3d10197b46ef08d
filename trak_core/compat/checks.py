"""Check what a user hands to a TRAKer: the task, the projector, checkpoints, and batches."""

import contextlib
import math
import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.compat.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from trak_core.compat.projectors import AbstractProjector, known_projection
from trak_core.compat.savers import AbstractSaver, AssertedError
from trak_core.errors import InputError, listed
from trak_core.study.load_checkpoint import load_state_dict, state_dict_sha256

# What a model or task raises at a batch that it cannot take.
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)


def integer(value: Any, name: str, low: int, high: int) -> int:
    """Return an integer of any library as Python's own; it must be in [low, high)."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number < high:
        raise InputError(
            f"`{name}` must be an integer, at least {low} and below {high}. Found {value!r}.",
            code="compat.integer",
        )
    return number


def checked_lambda(lambda_reg: Any) -> float:
    """Return lambda as a number; NaN and negative ones would give scores without meaning."""
    if not (isinstance(lambda_reg, int | float) and 0 <= lambda_reg < math.inf):
        raise InputError(
            f"`lambda_reg` must be a number, at least 0. Found {lambda_reg!r}.",
            code="compat.lambda_reg",
        )
    return float(lambda_reg)


def checked_task(task: AbstractModelOutput | str) -> AbstractModelOutput:
    """Return the model output that a name stands for, or the instance itself."""
    if isinstance(task, str) and task in TASK_TO_MODELOUT:
        return TASK_TO_MODELOUT[task]()
    methods = ("get_output", "get_out_to_loss_grad")
    if isinstance(task, str | type) or not all(hasattr(task, method) for method in methods):
        raise InputError(
            f"`task` must be one of {', '.join(TASK_TO_MODELOUT)}, or an instance with the methods "
            f"of AbstractModelOutput. Found {task!r}.",
            code="compat.task",
        )
    return task


def store_metadata(
    projector: AbstractProjector,
    proj_dim: int,
    train_set_size: int,
    parameters: Mapping[str, torch.Size],
) -> dict[str, Any]:
    """Return the settings that all who share a folder must agree in."""
    known = known_projection(projector, sum(size.numel() for size in parameters.values()), 0)
    fields = {} if known is None else known.as_dict()
    return {
        "JL dimension": proj_dim,
        "JL matrix type": str(getattr(projector, "proj_type", "custom")),
        "train set size": train_set_size,
        # Folders of the original lack this: their matrices cannot be made again.
        "matrix": {key: value for key, value in fields.items() if key != "stream"},
        "parameters": list(parameters),
    }


def _why_no_state_dict(checkpoint: Any) -> str | None:
    """Return what a checkpoint is instead of a state dict, and what to give; None if it is one."""
    if isinstance(checkpoint, str | Path):
        return f"the path {str(checkpoint)!r}: give `torch.load({str(checkpoint)!r})`"
    if not isinstance(checkpoint, Mapping):
        return f"{type(checkpoint).__name__}: give its `state_dict()`, if it is a model"
    others = [key for key, value in checkpoint.items() if not isinstance(value, Tensor)]
    for key in others:
        if isinstance(checkpoint[key], Mapping) and _why_no_state_dict(checkpoint[key]) is None:
            return f"one under the key {key!r}: give `checkpoint[{key!r}]`"
    return f"other values under {listed(others)}: leave them out" if others else None


def put_weights(model: nn.Module, checkpoint: Mapping[str, Tensor], model_id: int) -> str:
    """Load a state dict that fits into the model, and return the digest of the model's weights."""
    problem = _why_no_state_dict(checkpoint)
    if problem is not None:
        raise InputError(
            f"`checkpoint` must be a state dict, names to tensors. Found {problem}.",
            code="compat.state_dict",
        )
    load_state_dict(model, checkpoint, f"model id {model_id}")
    return state_dict_sha256(model.state_dict())


def check_weights(saver: AbstractSaver, model_id: int, digest: str) -> None:
    """Refuse other weights than those that a model id was featurized with."""
    known = saver.model_ids[model_id].get("checkpoint")
    if known not in {None, digest}:
        raise InputError(
            "A model id stands for one checkpoint. Found other weights than those with which model "
            f"id {model_id} was featurized in {saver.save_dir}. Use a model id for each "
            f"checkpoint; to start over, delete the folder {model_id} and id_{model_id}.json.",
            code="compat.other_weights",
        )


def checked_batch(batch: Iterable[Tensor]) -> list[Tensor]:
    """Return a batch as a list of tensors with as many rows each."""
    is_one = isinstance(batch, Tensor | str | dict) or not isinstance(batch, Iterable)
    tensors = [] if is_one else list(batch)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = [type(tensor).__name__ for tensor in tensors]
        raise InputError(
            "A batch must be a tuple or list of tensors, as the task takes them (images and "
            f"labels, say). Found {type(batch).__name__} of {listed(kinds) or 'nothing'}.",
            code="compat.batch",
        )
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or shapes[0][0] == 0:
        raise InputError(
            "The tensors of a batch must have the same number of samples, at least one, as their "
            f"first dimension. Found shapes {', '.join(map(str, shapes))}.",
            code="compat.batch_rows",
        )
    return tensors


def positions(
    inds: Any, num_samples: Any, start: int, n_batch: int, n_rows: int, noun: str
) -> np.ndarray:
    """Return where the rows of a batch belong: n_batch different integers from 0 to n_rows - 1.

    They are ``inds``, in any order, or with ``num_samples`` those from ``start`` on. ``noun`` says
    in messages what has positions.
    """
    if (inds is None) == (num_samples is None):
        given = "neither" if inds is None else "both"
        raise AssertedError(
            f"Give exactly one of `num_samples` and `inds`. Found {given}.",
            code="compat.inds_or_num_samples",
        )
    if inds is None:
        if integer(num_samples, "num_samples", 1, 2**63) != n_batch:
            raise InputError(
                f"`num_samples` must be the batch's number of samples, {n_batch}. Found "
                f"{num_samples}.",
                code="compat.num_samples",
            )
        rows = np.arange(start, start + n_batch)
    else:
        rows = np.asarray(inds.cpu() if isinstance(inds, Tensor) else list(inds)).reshape(-1)
        if rows.dtype.kind not in "iu" or len(rows) != n_batch or len(np.unique(rows)) != n_batch:
            raise InputError(
                f"`inds` must hold a different integer for each of the batch's {n_batch} samples. "
                f"Found {len(rows)} values of dtype {rows.dtype}: {listed(rows.tolist())}.",
                code="compat.inds",
            )
        rows = rows.astype(np.int64)
    outside = rows[(rows < 0) | (rows >= n_rows)]
    if len(outside):
        raise InputError(
            f"There are {n_rows} {noun}, so positions must be from 0 to {n_rows - 1}. Found "
            f"{listed(outside.tolist())}. Sequential writing starts again with each checkpoint.",
            code="compat.position",
        )
    return rows


def check_not_all_zero(gradients: Tensor) -> None:
    """Refuse projected gradients (B, k) that are 0 for all of several samples."""
    if len(gradients) > 1 and not gradients.any():
        raise InputError(
            f"Gradients must not be 0 for every sample. Found zeros alone for {len(gradients)} "
            f"samples: all scores would be 0. `get_output` sees one sample at a time, so that a "
            "loss that compares the samples of a batch is a constant: compare a sample with others "
            "that stay the same, as CLIPModelOutput does. Else look for a `grad_wrt` that doesn't "
            "lead to the output.",
            code="compat.all_zero",
        )


def stored(
    values: Tensor, dtype: torch.dtype, rows: np.ndarray, noun: str, *, may_vanish: bool = False
) -> np.ndarray:
    """Return a row a sample in the dtype of the store, float16 or float32.

    Values that are not finite, and rows that float16 cannot hold, raise an error that calls them
    ``noun`` and names the samples by ``rows``. With ``may_vanish`` a row may round to zeros.
    """
    wide = values.detach().float().cpu()
    finite = torch.isfinite(wide).all(dim=1)
    if not finite.all():
        raise InputError(
            f"The {noun} must be finite. Found NaN or infinity for the samples "
            f"{listed(rows[~finite.numpy()].tolist())}. Look for bad values in these samples and "
            "in the checkpoint.",
            code="compat.not_finite",
        )
    narrow = wide.to(dtype)
    lost = ~torch.isfinite(narrow).all(dim=1)
    if not may_vanish:
        lost |= wide.any(dim=1) & ~narrow.any(dim=1)
    if lost.any():
        raise InputError(
            f"The {noun} must lie between 6e-8 and 65504 to be stored as float16. Found sizes up "
            f"to {wide[lost].abs().max():.2g} for the samples "
            f"{listed(rows[lost.numpy()].tolist())}. Set use_half_precision=False.",
            code="compat.float16",
        )
    return narrow.numpy()


@contextlib.contextmanager
def explain_refusals(batch: Sequence[Tensor]) -> Generator[None, None, None]:
    """Name a batch's tensors where a model or task fails at it; the failure stays the cause."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except _REFUSALS as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in batch)
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"The task and the model must take the batch. They failed with tensors {shapes}: "
            f"{type(error).__name__}: {reason}",
            code="compat.model_call",
        ) from error

"""What a user hands over with a batch: its tensors, where its rows belong, how they are stored."""

import contextlib
import operator
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trak_core.errors import InputError

# What a model or task raises at a batch that it cannot take.
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)


def listed(values: Sequence[Any]) -> str:
    """Return the first few values as text, and how many more there are."""
    shown = ", ".join(map(str, values[:8]))
    return f"{shown} and {len(values) - 8} more" if len(values) > 8 else shown


def integer(value: Any, name: str, low: int, high: int) -> int:
    """Return an integer of any library as Python's own.

    Raises:
        InputError: If it is none, or not at least ``low`` and below ``high``.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or not low <= found < high:
        raise InputError(
            f"`{name}` must be an integer, at least {low} and below {high}. Found {value!r}."
        )
    return found


def checked_batch(batch: Iterable[Tensor]) -> list[Tensor]:
    """Return a batch as a list of tensors with as many rows each.

    Raises:
        InputError: If it is anything else.
    """
    if isinstance(batch, Tensor | str | dict) or not isinstance(batch, Iterable):
        raise InputError(
            "A batch must be a tuple or list of tensors, as the task takes them (images and "
            f"labels, say). Found {type(batch).__name__}."
        )
    tensors = list(batch)
    bad = [type(t).__name__ for t in tensors if not isinstance(t, Tensor)]
    if bad or not tensors:
        found = f"an entry of type {bad[0]}" if bad else "an empty batch"
        raise InputError(f"A batch must be a tuple or list of tensors. Found {found}.")
    shapes = [tuple(t.shape) for t in tensors]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or shapes[0][0] == 0:
        raise InputError(
            "The tensors of a batch must have the same number of samples, at least one, as their "
            f"first dimension. Found shapes {', '.join(map(str, shapes))}."
        )
    return tensors


def positions(
    inds: Any, num_samples: Any, start: int, n_batch: int, n_rows: int, what: str
) -> np.ndarray:
    """Return where the rows of a batch belong.

    Args:
        inds: One position a sample, in any order; or None.
        num_samples: The size of the batch, whose rows then follow one another; or None.
        start: Position of the first, with ``num_samples``.
        n_batch: Samples of the batch.
        n_rows: How many positions there are.
        what: What has positions, in words.

    Returns:
        Different integers from 0 to n_rows - 1, shape (n_batch,), int64.

    Raises:
        InputError: If not exactly one of the two is given, or if it doesn't fit.
    """
    if (inds is None) == (num_samples is None):
        found = "neither" if inds is None else "both"
        raise InputError(f"Exactly one of `num_samples` and `inds` must be given. Found {found}.")
    if inds is None:
        count = integer(num_samples, "num_samples", 1, 2**63)
        if count != n_batch:
            raise InputError(
                f"`num_samples` must be the number of samples in the batch, {n_batch}. Found "
                f"{count}."
            )
        rows = np.arange(start, start + count)
    else:
        rows = np.asarray(inds.cpu() if isinstance(inds, Tensor) else list(inds)).reshape(-1)
        if rows.dtype.kind not in "iu" or len(rows) != n_batch:
            raise InputError(
                f"`inds` must hold one integer for each of the batch's {n_batch} samples. Found "
                f"{len(rows)} values of dtype {rows.dtype}."
            )
        rows = rows.astype(np.int64)
        if len(np.unique(rows)) < len(rows):
            raise InputError(f"`inds` must be all different. Found {listed(rows.tolist())}.")
    outside = rows[(rows < 0) | (rows >= n_rows)]
    if len(outside):
        raise InputError(
            f"There are {n_rows} {what}, so positions must be from 0 to {n_rows - 1}. Found "
            f"{listed(outside.tolist())}. Sequential writing starts again with each checkpoint."
        )
    return rows


def stored(
    values: Tensor, dtype: torch.dtype, rows: np.ndarray, what: str, *, may_vanish: bool = False
) -> np.ndarray:
    """Return rows in the dtype of the store.

    Args:
        values: One row a sample.
        dtype: float16 or float32.
        rows: Positions of the samples, for the message.
        what: What the values are, in words.
        may_vanish: Whether float16 may round a row to zeros.

    Raises:
        InputError: If a value is not finite, or if float16 cannot hold the row.
    """
    wide = values.detach().float().cpu()
    finite = torch.isfinite(wide).all(dim=1)
    if not finite.all():
        raise InputError(
            f"The {what} must be finite. Found NaN or infinity for the samples "
            f"{listed(rows[~finite.numpy()].tolist())}. Look for bad values in these samples and "
            "in the checkpoint."
        )
    narrow = wide.to(dtype)
    lost = ~torch.isfinite(narrow).all(dim=1)
    if not may_vanish:
        lost |= wide.any(dim=1) & ~narrow.any(dim=1)
    if lost.any():
        sizes = wide[lost].abs()
        raise InputError(
            f"The {what} must lie between 6e-8 and 65504 to be stored as float16. Found sizes up "
            f"to {sizes.max():.2g} for the samples {listed(rows[lost.numpy()].tolist())}. Set "
            "use_half_precision=False."
        )
    return narrow.numpy()


@contextlib.contextmanager
def taken_by_the_model(batch: Sequence[Tensor]) -> Generator[None, None, None]:
    """Say what was handed over where a model or task fails at a batch.

    Raises:
        InputError: In place of what was raised, which stays its cause.
    """
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except _REFUSALS as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in batch)
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"A batch must be what the task and the model take. Found tensors {shapes}, with which "
            f"the model failed: {type(error).__name__}: {reason}"
        ) from error

"""Gradients, and what is made of them, must be finite."""

from collections.abc import Sequence

import numpy as np
import torch

from trak_core.errors import InputError
from trak_core.gradients._per_sample import PerSample


def check_finite(result: PerSample, sample_ids: Sequence[object]) -> None:
    """Stop at NaN or infinity.

    Args:
        result: What a batch gave.
        sample_ids: The batch's ids, for the message.

    Raises:
        InputError: Naming the samples and the parameters.
    """
    bad = ~torch.isfinite(result.outputs)
    names = ["the model output itself"] if bad.any() else []
    for name, block in result.gradients.items():
        bad_rows = ~torch.isfinite(block.reshape(len(block), -1)).all(dim=1)
        if bad_rows.any():
            names.append(name)
            bad = bad | bad_rows
    if names:
        found = [sample_ids[i] for i in bad.nonzero().flatten().tolist()]
        half = {b.dtype for b in result.gradients.values()} & {torch.float16}
        overflow = (
            " float16 ends at 65504: bfloat16 or float32 weights reach further." if half else ""
        )
        raise InputError(
            "Per-sample gradients must be finite. Found NaN or infinity for the samples "
            f"{', '.join(map(str, found[:8]))}{' and more' if len(found) > 8 else ''} in "
            f"{', '.join(names[:8])}{' and more' if len(names) > 8 else ''}. Look for bad values "
            f"in these samples and in the checkpoint; an infinite score would hide them.{overflow}"
        )


def refuse_not_finite(sample_ids: Sequence[object], what: str) -> None:
    """Stop at numbers that are not finite.

    Args:
        sample_ids: Of the samples they belong to.
        what: What they are, at the beginning of a sentence.

    Raises:
        InputError: Always; it names the samples.
    """
    found = list(dict.fromkeys(map(str, sample_ids)))
    raise InputError(
        f"{what} must be finite. Found NaN or infinity for the samples {', '.join(found[:8])}"
        f"{' and more' if len(found) > 8 else ''}. Look for bad values in these samples and in the "
        "checkpoint; an infinite score would hide them."
    )


def check_finite_gramian(
    gramian: np.ndarray, row_ids: Sequence[object], ids: Sequence[object]
) -> None:
    """Refuse a Gramian with NaN or infinity: a bad gradient fills its whole row or column.

    Args:
        gramian: Inner products of gradients, shape (n, m).
        row_ids: Of the n samples.
        ids: Of the m samples.

    Raises:
        InputError: It names the samples.
    """
    bad = ~np.isfinite(gramian)
    if bad.any():
        rows, columns = (np.flatnonzero(bad.all(axis=axis)).tolist() for axis in (1, 0))
        if not (rows or columns):  # too large for each other alone
            rows = np.flatnonzero(bad.any(axis=1)).tolist()
        found = [row_ids[i] for i in rows] + [ids[i] for i in columns]
        refuse_not_finite(found, "Inner products of gradients")

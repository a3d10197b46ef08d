"""What stages say where a model gives NaN or infinity."""

from collections.abc import Sequence

import numpy as np

from trak_core.errors import InputError


def refuse(sample_ids: Sequence[object], what: str) -> None:
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


def check_finite_kernel(
    kernel: np.ndarray, row_ids: Sequence[object], ids: Sequence[object]
) -> None:
    """Refuse a kernel with NaN or infinity: a bad gradient fills its whole row or column.

    Args:
        kernel: Inner products of gradients, shape (n, m).
        row_ids: Of the n samples.
        ids: Of the m samples.

    Raises:
        InputError: It names the samples.
    """
    bad = ~np.isfinite(kernel)
    if bad.any():
        rows, columns = (np.flatnonzero(bad.all(axis=axis)).tolist() for axis in (1, 0))
        if not (rows or columns):  # too large for each other alone
            rows = np.flatnonzero(bad.any(axis=1)).tolist()
        found = [row_ids[i] for i in rows] + [ids[i] for i in columns]
        refuse(found, "Inner products of gradients")

"""Refuse gradients that say nothing: zero for every sample, or the same for all."""

import numpy as np

from trak_core.errors import InputError

# Two computations of one sample's features differ by this part of the largest entry, at most.
_ROUNDING = 1e-5


class Variety:
    """Counts samples without a gradient, and compares all with the first, a block at a time.

    Attributes:
        n_samples: Samples seen.
        n_zero: How many of them have zeros alone.
        are_alike: Whether all are equal, to rounding.
    """

    def __init__(self) -> None:
        self.n_samples = self.n_zero = 0
        self.are_alike = True
        self._first: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """Take a row a sample, shape (n, k): features, or inner products with all others."""
        if self._first is None:
            self._first = rows[0].astype(np.float64)
        self.n_samples += len(rows)
        self.n_zero += int((~rows.any(axis=1)).sum())
        if self.are_alike:
            allowed = max(_ROUNDING, 4 * float(np.finfo(rows.dtype).eps))
            allowed *= np.abs(self._first).max()
            self.are_alike = bool(np.abs(rows - self._first).max() <= allowed)

    def check(self, samples: str, *, must_differ: bool) -> None:
        """Refuse several samples of which none has a gradient; warn if most of them don't.

        Equal gradients of several are refused where they ``must_differ``: targets may be asked
        twice. ``samples`` says whose they are.
        """
        n = self.n_samples
        if n > 1 and self.n_zero == n:
            raise InputError(
                f"Gradients must not be 0 for every sample. Found zeros alone for all {n} "
                f"{samples}: all scores would be 0. Look for `parameters` that don't lead to the "
                "model output, for layers whose weights in the checkpoint are 0 or let nothing "
                "pass, and for a `detach()` on the way.",
                code="gradients.all_zero",
            )
        if n > 1 and self.are_alike and must_differ:
            raise InputError(
                f"Gradients must tell samples apart. Found the same for all {n} {samples}: scores "
                "would not depend on them. Look for a data set that returns one sample again and "
                "again, for a model that ignores its input, and for `parameters` whose gradient is "
                "a constant, such as the last bias of a regression.",
                code="gradients.all_alike",
            )
        if 2 * self.n_zero > n:
            print(
                f"Warning: the gradients of {self.n_zero} of {n} {samples} are 0 in every entry, "
                "and so are their scores. Look for layers that let nothing pass, such as a ReLU "
                "whose inputs are all negative.",
                flush=True,
            )

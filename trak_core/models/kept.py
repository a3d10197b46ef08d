"""Samples in memory, each text as long as it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.gradients import Batch, joined


@dataclass(frozen=True, slots=True)
class Kept:
    """Samples on one device, to be put together again and again.

    Attributes:
        parts: A batch of one for each sample.
        ids: Their ids.
        places: Where each belongs in the study's own order, shape (n,).
    """

    parts: list[Batch]
    ids: list[int] | list[str]
    places: np.ndarray

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.parts)

    @property
    def n_bytes(self) -> int:
        """What the inputs take."""
        return sum(tensor.nbytes for part in self.parts for _, tensor in part.tensors())

    def rows(self, which: slice) -> Batch:
        """Return some of the samples; texts are padded to the longest of them."""
        return joined(self.parts[which])

    def take(self, which: Sequence[int]) -> "Kept":
        """Return some of the samples, in this order, which is the order they belong in."""
        ids = [self.ids[i] for i in which]
        return Kept([self.parts[i] for i in which], ids, np.arange(len(ids)))  # pyright: ignore[reportArgumentType]

    def blocks(self, start: int, size: int) -> Iterator[tuple[slice, Batch]]:
        """Yield blocks of samples and where they are, from one sample on."""
        for first in range(start, len(self), size):
            block = slice(first, first + size)
            yield block, self.rows(block)

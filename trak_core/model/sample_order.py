"""Put texts of similar length together for a job, and each result back in its place."""

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from trak_core.errors import InputError
from trak_core.gradients import Batch, Room, as_batch, joined, shapes_of
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.study.study import Split

_MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class Arranged:
    """Samples in the order in which they are taken.

    Where texts differ in length, each window of them begins with its longest, so that those of a
    batch are of like length and little is padded. Else the order is the study's own.

    Attributes:
        split: The samples, in this order.
        output: The model output they are for.
        rows: Where each belongs in the study's own order, shape (n,).
        lengths: Tokens of each text; None where nothing has to be padded.
        along: Names of the inputs with a row a token.
        makes_mask: Whether texts get an attention mask, of ones.
        window: Samples that are ordered among themselves.
    """

    split: Split
    output: ModelOutput
    rows: np.ndarray
    lengths: list[int] | None
    along: frozenset[str]
    makes_mask: bool
    window: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def batch(self, start: int, stop: int) -> Batch:
        """Read samples; texts of different lengths are padded on the right.

        Args:
            start: The first.
            stop: One beyond the last.

        Returns:
            The samples, on the CPU.

        Raises:
            InputError: If the samples cannot be stacked.
        """
        if self.lengths is None:
            return as_batch(self.split.batch(start, stop), self.output)
        return joined([self._text(i) for i in range(start, stop)])

    def _text(self, i: int) -> Batch:
        one = as_batch(self.split.batch(i, i + 1), self.output)
        kwargs, along = one.kwargs, self.along
        if self.makes_mask:
            kwargs = {**kwargs, _MASK: torch.ones(one.labels.shape, dtype=torch.int64)}
            along = along | {_MASK}
        lengths = torch.tensor([one.labels.shape[1]])
        return Batch(one.args, kwargs, one.labels, lengths, along)

    def few(self, n: int) -> list[int]:
        """Return the places of some samples: the first ones; or the longest, the shortest, more."""
        if self.lengths is None:
            return list(range(min(n, len(self))))
        by_length = np.argsort(self.lengths, kind="stable")[::-1]
        spread = np.linspace(0, len(self) - 1, n).astype(int)
        return list(dict.fromkeys(by_length[[0, -1, *spread]].tolist()))[:n]

    @contextmanager
    def blaming_the_longest(self) -> Generator[None, None, None]:
        """Name the longest text in an error that may come of its length."""
        if self.lengths is None:
            yield
            return
        longest = int(np.argmax(self.lengths))
        with blaming(self.split.ids[longest], self.lengths[longest]):
            yield

    def length(self, i: int) -> int:
        """Return the tokens of the longest text from the i-th on to the end of its window."""
        return 0 if self.lengths is None else self.lengths[i]

    def batches_of(self, most: int, room: Room | None = None) -> Callable[[int], int]:
        """Return how many samples, from one on, to take together.

        Args:
            most: At most so many.
            room: No more than fit; None for a forward pass alone, which is not measured.
        """

        def at_once(start: int) -> int:
            fit = most if room is None else min(most, room.most(self.length(start)))
            # No batch goes beyond a window.
            return fit if self.lengths is None else min(fit, self.window - start % self.window)

        return at_once

    def in_order(
        self, blocks: Iterable[tuple[int, int, Sequence[Tensor]]]
    ) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
        """Put what was computed of samples back into the study's own order.

        Args:
            blocks: Start and stop of batches, in the order in which samples are taken, and tensors
                with a row for each of them.

        Yields:
            The like, a window at a time where there are several.
        """
        if self.lengths is None:
            yield from blocks
            return
        held: list[Sequence[Tensor]] = []
        start = 0
        for _, last, tensors in blocks:
            held.append(tensors)
            if last % self.window == 0 or last == len(self):
                back = torch.from_numpy(np.argsort(self.rows[start:last]))
                yield start, last, [torch.cat(parts)[back] for parts in zip(*held, strict=True)]
                held, start = [], last


@contextmanager
def blaming(sample_id: object, length: int) -> Generator[None, None, None]:
    """Name a text in an error that may come of its length."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{str(error).rstrip('.')}. Sample {sample_id} is a text of {length} tokens: texts "
            "must be no longer than the model's positions and the memory allow. Cut longer ones "
            "into pieces."
        ) from error


def arranged(
    splits: Sequence[Split], model: nn.Module, output: ModelOutput, window: int | None = None
) -> list[Arranged]:
    """Arrange the samples of splits which a job takes together.

    All texts are read once, for their lengths: memory must hold the longest. Other samples are not.

    Args:
        splits: The samples.
        model: Whether it takes an attention mask counts.
        output: The model output.
        window: Samples to be ordered among themselves; None for all.

    Returns:
        The samples of each split; of texts of different lengths, also where those of one split are
        of one length, so that samples of different splits can be together.

    Raises:
        InputError: If texts have shapes that no padding makes the same.
    """
    if output.label_ndim != 1:
        return [_as_they_are(split, output) for split in splits]
    found = shapes_of(
        (
            (split.ids[i], as_batch(split.batch(i, i + 1), output))
            for split in splits
            for i in range(len(split.ids))
        ),
        output,
    )
    if not found.differ:
        return [_as_they_are(split, output) for split in splits]
    lengths, parts = found.lengths, []
    for split in splits:
        own, lengths = lengths[: len(split.ids)], lengths[len(split.ids) :]
        parts.append(_by_length(split, own, found.along, model, output, window or len(own)))
    return parts


def _as_they_are(split: Split, output: ModelOutput) -> Arranged:
    n = len(split.ids)
    return Arranged(split, output, np.arange(n), None, frozenset(), False, n)


def _by_length(
    split: Split,
    lengths: Sequence[int],
    along: frozenset[str],
    model: nn.Module,
    output: ModelOutput,
    window: int,
) -> Arranged:
    tokens = np.array(lengths)
    starts = range(0, len(tokens), window)
    rows = np.concatenate([
        start + np.argsort(-tokens[start : start + window], kind="stable") for start in starts
    ])
    ordered = part_of(split, rows.tolist())
    takes_mask = _MASK in inspect.signature(model.forward).parameters
    one = as_batch(split.batch(0, 1), output)
    makes_mask = takes_mask and not one.args and _MASK not in one.kwargs
    return Arranged(ordered, output, rows, tokens[rows].tolist(), along, makes_mask, window)


def part_of(split: Split, rows: Sequence[int]) -> Split:
    """Return some of the samples, in this order."""
    samples = Subset(split.samples, rows)  # pyright: ignore[reportArgumentType]
    ids = [split.ids[i] for i in rows]
    return Split(samples, ids)  # pyright: ignore[reportArgumentType]


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

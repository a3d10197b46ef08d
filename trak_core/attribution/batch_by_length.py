"""Sort texts by length, so that batches need little padding, and put results back in order."""

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients import Batch, MemoryBudget, as_batch, joined, shapes_of
from trak_core.gradients.model_inputs import Shapes
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.study.dataset_split import Split

_MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class OrderedSamples:
    """Samples in the order in which they are processed.

    Texts of different lengths are divided into windows of consecutive texts, and each window is
    sorted by length, longest first, so that batches contain little padding. All other samples keep
    their original order.

    Attributes:
        split: The samples in the order of processing.
        output: The model output, which determines the shape of labels.
        rows: The index of each sample in the original order, shape (n,).
        lengths: The number of tokens of each text. None if no padding is needed.
        shapes: The shapes of all texts, which determine the padding. None if there is no padding.
        makes_mask: Whether to add an attention mask, which is 1 for tokens and 0 for padding.
        window: The number of samples in a window.
    """

    split: Split
    output: ModelOutput
    rows: np.ndarray
    lengths: list[int] | None = None
    shapes: Shapes | None = None
    makes_mask: bool = False
    window: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1`` on the CPU. Texts are padded on the right."""
        if self.lengths is None:
            return as_batch(self.split.batch(start, stop), self.output)
        return joined([self._text(i) for i in range(start, stop)])

    def _text(self, i: int) -> Batch:
        text = as_batch(self.split.batch(i, i + 1), self.output)
        assert self.shapes is not None
        kwargs, token_inputs = dict(text.kwargs), self.shapes.token_inputs
        encoder_lengths = dict(self.shapes.encoder_lengths)
        if self.makes_mask:
            masked = next((kwargs[name] for name in encoder_lengths), text.labels)
            kwargs[_MASK] = torch.ones(masked.shape[:2], dtype=torch.int64)
            if encoder_lengths:
                encoder_lengths[_MASK] = max(encoder_lengths.values())
            else:
                token_inputs = token_inputs | {_MASK}
        for name, length in encoder_lengths.items():
            missing = length - kwargs[name].shape[1]
            inner = [0, 0] * (kwargs[name].ndim - 2)
            kwargs[name] = nn.functional.pad(kwargs[name], (*inner, 0, missing))
        lengths = torch.tensor([text.labels.shape[1]])
        return replace(text, kwargs=kwargs, lengths=lengths, token_inputs=token_inputs)

    def few(self, n: int) -> list[int]:
        """Return the positions of up to ``n`` samples.

        For texts of different lengths, the longest text comes first, and the others cover all
        lengths.
        """
        if self.lengths is None:
            return list(range(min(n, len(self))))
        by_length = np.argsort(self.lengths, kind="stable")[::-1]
        spread = np.linspace(0, len(self) - 1, n).astype(int)
        return list(dict.fromkeys(by_length[[0, -1, *spread]].tolist()))[:n]

    def naming_longest(self) -> AbstractContextManager[None]:
        """Return a context in which error messages name the longest text as a possible cause."""
        if self.lengths is None:
            return nullcontext()
        longest = int(np.argmax(self.lengths))
        return naming_text(self.split.ids[longest], self.lengths[longest])

    def batches_of(self, most: int, room: MemoryBudget | None = None) -> Callable[[int], int]:
        """Return a function that maps the position of a batch's first sample to the batch size.

        A batch contains at most ``most`` samples, all from the same window, and fits into the
        memory budget ``room``.
        """

        def at_once(start: int) -> int:
            # Texts are sorted, so the first text of a batch is the longest one.
            length = 0 if self.lengths is None else self.lengths[start]
            fit = most if room is None else min(most, room.most(length))
            return fit if self.lengths is None else min(fit, self.window - start % self.window)

        return at_once

    def in_order(
        self, blocks: Iterable[tuple[int, int, Sequence[Tensor]]]
    ) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
        """Yield the start, the stop and the results of each window of samples.

        Within a window, the results are in the original order of the samples. ``blocks`` contains
        the start, stop and results of each batch, in the order of processing.
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
def naming_text(sample_id: object, length: int) -> Generator[None, None, None]:
    """Add the id and length of a text to the message of an InputError raised in the context."""
    try:
        yield
    except InputError as error:
        if error.code == "gradients.no_decoder_inputs":
            raise
        raise InputError(
            f"{str(error).rstrip('.')}. Sample {sample_id} is a text of {length} tokens. Texts "
            "must fit in memory, and must not exceed the model's maximum length. Split longer "
            "texts, or truncate them as in training. For a ready-made study, set for example "
            "`study_arguments: {max_tokens: 64}`.",
            code=error.code,
        ) from error


def order_samples(
    splits: Sequence[Split], model: nn.Module, output: ModelOutput, window: int | None = None
) -> list[OrderedSamples]:
    """Return the samples of each split in the order in which they are processed.

    All texts are read once to find their lengths. If any two texts differ in length, the texts of
    all splits are padded, and get an attention mask if the model accepts one. ``window`` is the
    number of consecutive samples that are sorted by length together. None sorts all samples.
    """
    shapes = None
    if output.label_ndim == 1:
        texts = (
            (
                f"{split.ids[i]}{' of the targets' * (number > 0)}",
                as_batch(split.batch(i, i + 1), output),
            )
            for number, split in enumerate(splits)
            for i in range(len(split.ids))
        )
        shapes = shapes_of(texts, output)
    if shapes is None or not shapes.differ:
        return [OrderedSamples(split, output, np.arange(len(split.ids))) for split in splits]
    takes_mask = _MASK in inspect.signature(model.forward).parameters
    ordered, first = [], 0
    for split in splits:
        n = len(split.ids)
        tokens = np.array(shapes.lengths[first : first + n])
        first += n
        own_window = window or n
        # lexsort sorts by its last key first: by window, and within a window by descending length.
        rows = np.lexsort([-tokens, np.arange(n) // own_window])
        text = as_batch(split.batch(0, 1), output)
        makes_mask = takes_mask and not text.args and _MASK not in text.kwargs
        # An encoder-decoder model needs no mask if all its inputs have the same length.
        makes_mask &= bool(shapes.encoder_lengths or shapes.token_inputs) or not output.takes_labels
        given = split.select(rows.tolist()), output, rows, tokens[rows].tolist()
        ordered.append(OrderedSamples(*given, shapes, makes_mask, own_window))
    return ordered

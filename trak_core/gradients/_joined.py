"""Batches put together, texts of different lengths padded to the longest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trak_core.gradients._batch import Batch
from trak_core.model_outputs.model_output import IGNORED


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of several batches as one.

    Texts that have ``lengths`` are padded on the right: their labels with ``IGNORED``, inputs along
    the tokens with 0, which is a token of every vocabulary and what an ``attention_mask`` leaves
    out.

    Args:
        batches: At least one, with the same inputs; all with lengths, or none.

    Returns:
        Their samples, one after another.
    """
    first = batches[0]
    longest = None if first.lengths is None else max(one.labels.shape[1] for one in batches)
    inputs = [dict(one.tensors()) for one in batches]
    together = {
        name: _joined([of_one[name] for of_one in inputs], longest if name in first.along else None)
        for name in inputs[0]
    }
    labels = _joined([one.labels for one in batches], longest, IGNORED)
    lengths = [one.lengths for one in batches if one.lengths is not None]
    return first.with_inputs(together, labels, torch.cat(lengths) if lengths else None)


def _joined(tensors: Sequence[Tensor], longest: int | None, filling: int = 0) -> Tensor:
    """Put tensors (samples, ...) together, with ``longest`` rows of each sample if it is given."""
    if longest is None:
        return torch.cat(list(tensors))
    padded = []
    for tensor in tensors:
        missing = len(tensor), longest - tensor.shape[1], *tensor.shape[2:]
        padded.append(torch.cat([tensor, tensor.new_full(missing, filling)], dim=1))
    return torch.cat(padded)

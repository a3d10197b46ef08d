"""TRAK's kernel without a projection: inner products of gradients, folded over blocks of samples.

The gradients are those of a model output f, one a sample. n x n is the only large object: two
blocks of samples are in the model at a time, and of their gradients nothing is formed that the
engine doesn't need.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients import model_prediction
from trak_core.gramian.parameters import parameter_gramian
from trak_core.gramian.rules import MixedSamplesError
from trak_core.model_outputs import ModelOutput

# The model's positional arguments and, last, the labels; first dimension = sample.
Batch = Sequence[Tensor]


def train_gramian(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    blocks: Sequence[Batch],
) -> np.ndarray:
    """Return K = J J^T, J the gradients of f at all samples, shape (n, p).

    Each pair of blocks takes one pass through the model, so that the fewer blocks the faster: take
    the largest that memory allows. How samples are cut changes the result by rounding only.

    Args:
        model: In evaluation mode, on the blocks' device. Unchanged.
        parameters: From ``select_parameters``.
        output: The model output f.
        blocks: At least one, of at least one sample each.

    Returns:
        Shape (n, n), float64, exactly symmetric; n x n numbers are in memory.

    Raises:
        InputError: If there are no samples, or if the model mixes them.
    """
    starts = _starts(blocks)
    kernel = np.zeros((starts[-1], starts[-1]))
    pairs = list(itertools.combinations(range(len(blocks)), 2)) or [(0,)]
    for pair in pairs:
        part = _gramian_of(model, parameters, output, [blocks[i] for i in pair])
        places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in pair])
        kernel[np.ix_(places, places)] = part
    lower = np.tril(kernel)
    return lower + np.tril(lower, -1).T


def cross_gramian(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    train_blocks: Sequence[Batch],
    target_blocks: Sequence[Batch],
) -> np.ndarray:
    """Return K_t = J J_t^T between the gradients of f at train samples and at targets.

    Args:
        model: As for ``train_gramian``.
        parameters: As for ``train_gramian``.
        output: The model output f.
        train_blocks: Blocks of the n train samples.
        target_blocks: Blocks of the m targets.

    Returns:
        Shape (n, m), float64.

    Raises:
        InputError: If there are no samples on one side, or if the model mixes them.
    """
    rows, columns = _starts(train_blocks), _starts(target_blocks)
    kernel = np.zeros((rows[-1], columns[-1]))
    for i, j in itertools.product(range(len(train_blocks)), range(len(target_blocks))):
        part = _gramian_of(model, parameters, output, [train_blocks[i], target_blocks[j]])
        n = rows[i + 1] - rows[i]
        kernel[rows[i] : rows[i + 1], columns[j] : columns[j + 1]] = part[:n, n:]
    return kernel


def _starts(blocks: Sequence[Batch]) -> list[int]:
    starts = [0, *itertools.accumulate(len(block[-1]) for block in blocks)]
    if starts[-1] == 0:
        raise InputError("The kernel needs at least one sample. Found none.")
    return starts


def _gramian_of(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    blocks: Sequence[Batch],
) -> np.ndarray:
    *inputs, labels = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
    with torch.enable_grad():
        predictions = model_prediction(model(*inputs))
        values = torch.vmap(output.value)(predictions, labels)
    try:
        gramian = parameter_gramian(values, list(parameters.values()), batch_dim=0)
    except MixedSamplesError:
        raise InputError(
            "A model output must depend on its own sample alone. Found statistics over samples: "
            "a batch normalisation in training mode, or one that keeps no running statistics. Put "
            "the model in evaluation mode, or give that layer running statistics."
        ) from None
    return gramian.to("cpu", torch.float64).numpy()

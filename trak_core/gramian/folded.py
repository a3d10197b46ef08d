"""TRAK's gramian without a projection: inner products of gradients, folded over blocks of samples.

The gradients are those of a model output f, one a sample. n x n is the only large object: two
blocks of samples are in the model at a time, and of their gradients nothing is formed that the
engine doesn't need.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.gradients import Batch, Samples, as_batch, graph_to, joined
from trak_core.gramian.parameters import parameter_gramian
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.one_pass.rules import MixedSamplesError


def train_gramian(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    blocks: Sequence[Samples],
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
    batches = [as_batch(block, output) for block in blocks]
    starts = _starts(batches)
    gramian = np.zeros((starts[-1], starts[-1]))
    pairs = list(itertools.combinations(range(len(batches)), 2)) or [(0,)]
    for pair in pairs:
        part = _gramian_of(model, parameters, output, [batches[i] for i in pair])
        places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in pair])
        gramian[np.ix_(places, places)] = part
    lower = np.tril(gramian)
    return lower + np.tril(lower, -1).T


def cross_gramian(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    train_blocks: Sequence[Samples],
    target_blocks: Sequence[Samples],
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
    train = [as_batch(block, output) for block in train_blocks]
    targets = [as_batch(block, output) for block in target_blocks]
    rows, columns = _starts(train), _starts(targets)
    gramian = np.zeros((rows[-1], columns[-1]))
    for i, j in itertools.product(range(len(train)), range(len(targets))):
        part = _gramian_of(model, parameters, output, [train[i], targets[j]])
        n = rows[i + 1] - rows[i]
        gramian[rows[i] : rows[i + 1], columns[j] : columns[j + 1]] = part[:n, n:]
    return gramian


def _starts(batches: Sequence[Batch]) -> list[int]:
    starts = [0, *itertools.accumulate(map(len, batches))]
    if starts[-1] == 0:
        raise InputError(
            "The Gramian needs at least one sample. Found none.", code="gramian.no_sample"
        )
    return starts


def _gramian_of(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    batches: Sequence[Batch],
) -> np.ndarray:
    batch = joined(batches)
    with graph_to(model, parameters.values()):
        outputs = output.read(batch.given_to(model))
        values = torch.vmap(output.value)(outputs, batch.labels)
    try:
        gramian = parameter_gramian(values, list(parameters.values()), batch_dim=0)
    except MixedSamplesError:
        raise InputError(
            "A model output must depend on its own sample alone. Found statistics over samples: "
            "a batch normalisation in training mode, or one that keeps no running statistics. Put "
            "the model in evaluation mode, or give that layer running statistics.",
            code="gramian.mixing_model",
        ) from None
    return gramian.to("cpu", torch.float64).numpy()

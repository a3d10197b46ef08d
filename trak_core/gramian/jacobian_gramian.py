"""Compute the Gramian J J^T of a Jacobian without the Jacobian.

``Engine`` reads a graph that the caller has made. ``train_gramian`` and ``cross_gramian`` run a
model on blocks of samples; n x n is their only large object, because two blocks are in the model at
a time.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients import (
    Batch,
    Samples,
    as_batch,
    graph_to,
    joined,
    memory_formats_kept_apart,
)
from trak_core.gradients.gradient_terms import Contribution, add_product, summed_parts
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.one_pass import by_rows, by_samples, plan_of
from trak_core.gradients.sample_owner_rules import MixedSamplesError
from trak_core.model_outputs.model_output import ModelOutput, over_samples


class Engine:
    """Computes J J^T, J the Jacobian of an output with respect to the parameters of modules.

    The engine reads the computation graph that a forward pass has left. It adds no hooks to the
    modules, keeps no state between calls, and leaves the graph as it was, so that
    ``output.backward(weights)`` works afterwards. No ``.grad`` changes. The Gramian belongs to the
    forward pass that was made, with its dropout.

    With ``batch_dim`` one backward pass serves all samples as far as the graph says which entries
    of a tensor belong to which sample. For linear layers, convolutions, embeddings, normalisation
    layers, and parameters that are added or multiplied, the saved inputs and the gradients of the
    outputs give the inner products of the samples' gradients. Any other operation is differentiated
    once for each sample. Below an operation that hides the samples, such as a recurrent layer, the
    engine computes as without ``batch_dim``. That takes longer and gives the same result.

    Without ``batch_dim`` all rows of the Jacobian go through the graph together, parameter by
    parameter. So they do where parameters have hooks, or modules full backward hooks, which change
    each row. ``batch_dim`` leaves out hooks on tensors made of parameters, such as a view.

    Args:
        modules: Their parameters, and those of their children, are differentiated if they have
            ``requires_grad``. No module may be part of another.
        batch_dim: The dimension of the output along which samples are independent: the entries of
            sample b depend on sample b of the data alone. None if there is no such dimension.

    Raises:
        InputError: If there is no module, or if one is part of another.

    Example:
        >>> import torch
        >>> from trak_core.gramian import Engine
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> inputs = torch.tensor([[1.0, 2, 3], [0, 1, 0]])
        >>> losses = model(inputs).squeeze(1)  # the gradient of each is its input
        >>> Engine(model, batch_dim=0).compute_gramian(losses)
        tensor([[14.,  2.],
                [ 2.,  1.]])

    Source: Quinton and Rey, "Jacobian Descent for Multi-Objective Optimization", arXiv 2406.16232,
    section 6, on uses of the Gramian. The algorithm is our own.
    """

    def __init__(self, *modules: nn.Module, batch_dim: int | None = None):
        if not modules:
            raise InputError(
                "The engine needs at least one module. Found none.", code="gramian.no_module"
            )
        for i, module in enumerate(modules):
            for j, other in enumerate(modules):
                if i != j and any(part is module for part in other.modules()):
                    raise InputError(
                        "None of the engine's modules may be part of another, or be there twice. "
                        f"Found {type(module).__name__} (number {i + 1}) in "
                        f"{type(other).__name__} (number {j + 1}). Leave the inner one out: its "
                        "parameters count as parameters of the outer one.",
                        code="gramian.nested_module",
                    )
        self._modules = modules
        self._batch_dim = batch_dim

    def compute_gramian(self, output: Tensor) -> Tensor:
        """Return J J^T for an output of shape [m1, ..., mk].

        Args:
            output: Real numbers with a graph, of any shape.

        Returns:
            Shape [m1, ..., mk, mk, ..., m1], the output's dtype, on its device: entry
            [i1, ..., ik, jk, ..., j1] is the inner product of the gradients of output[i1, ..., ik]
            and output[j1, ..., jk]. Zero if the output doesn't depend on the parameters.

        Raises:
            InputError: If the output has no graph, if it has no dimension ``batch_dim``, or if a
                module takes statistics over samples that ``batch_dim`` says are independent.
            RuntimeError: If an operation of the graph cannot be differentiated, for example because
                an earlier backward pass has freed it.
        """
        parameters = [
            parameter
            for module in self._modules
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        try:
            return parameter_gramian(output, parameters, self._batch_dim)
        except MixedSamplesError:
            pass  # says less than the modules do
        names = [
            f"{name or 'the module itself'} ({type(part).__name__})"
            for module in self._modules
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        ]
        raise InputError(
            "With batch_dim, samples must be independent. Found statistics over the samples in "
            f"{', '.join(names) or 'a batch normalisation'}. Put it in evaluation mode before the "
            "forward pass, replace it (by GroupNorm or InstanceNorm, say), or leave batch_dim out, "
            "which is slower but always right.",
            code="gramian.mixed_samples",
        )


def train_gramian(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    blocks: Sequence[Samples],
) -> np.ndarray:
    """Return K = J J^T, shape (n, n), float64, exactly symmetric; J are gradients of f, (n, p).

    Each pair of blocks takes one pass through the model. Choose the largest blocks that memory
    allows, because fewer blocks are faster. How samples are cut into blocks changes the result by
    rounding only. The model is in evaluation mode, on the blocks' device; the parameters are from
    ``select_parameters``. Blocks of no samples, and a model that mixes them, are refused.
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
    """Return K_t = J J_t^T, (n, m), float64, between train samples and targets.

    Both come in blocks, and what is refused is as for ``train_gramian``.
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
        values = over_samples(output.value, outputs, batch.labels)
    try:
        with memory_formats_kept_apart(values):
            gramian = parameter_gramian(values, list(parameters.values()), batch_dim=0)
    except MixedSamplesError:
        raise InputError(
            "A model output must depend on its own sample alone. Found statistics over samples: "
            "a batch normalisation in training mode, or one that keeps no running statistics. Put "
            "the model in evaluation mode, or give that layer running statistics.",
            code="gramian.mixing_model",
        ) from None
    return gramian.to("cpu", torch.float64).numpy()


def parameter_gramian(
    output: Tensor, parameters: Sequence[Tensor], batch_dim: int | None
) -> Tensor:
    """Return what ``Engine.compute_gramian`` does; a parameter that is given twice counts once.

    A ``MixedSamplesError`` says that an operation takes statistics over independent samples.
    """
    if not (isinstance(output, Tensor) and output.requires_grad):
        kind = "no gradient" if isinstance(output, Tensor) else type(output).__name__
        raise InputError(
            "The output must be a tensor with a graph, that is with requires_grad. "
            f"Found {kind}. Call the modules outside of torch.no_grad(), and don't detach.",
            code="gramian.no_graph",
        )
    n = output.numel()
    order = list(range(output.ndim))
    gramian = output.detach().new_zeros(n, n)
    products = _Products(gramian)
    with torch.no_grad():
        dim = None if batch_dim is None else _checked_dim(output, batch_dim)
        plan = None
        with suppress(UnreadableGraphError):
            plan = None if dim is None else plan_of(output, parameters, dim)
        if dim is None or plan is None:
            by_rows(products, output, parameters)
        else:
            try:
                by_samples(products, output, plan, dim, keep_graph=True)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                # An operation that cannot take several rows at once; its own error comes again.
                gramian.zero_()
                by_rows(_Products(gramian), output, parameters)
            else:
                order.append(order.pop(dim))
    shape = [output.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(output.ndim)]
    ahead = [output.ndim + dim for dim in reversed(back)]
    return gramian.view(shape + shape).permute(back + ahead)


def _checked_dim(output: Tensor, batch_dim: int) -> int:
    if not -output.ndim <= batch_dim < output.ndim:
        raise InputError(
            f"The output must have the dimension batch_dim = {batch_dim}. Found an output of shape "
            f"{tuple(output.shape)}. Give one output or loss a sample, with "
            'reduction="none" for instance, or leave batch_dim out.',
            code="gramian.batch_dim",
        )
    return batch_dim % output.ndim


@dataclass(frozen=True, slots=True)
class _Products:
    """Adds up inner products in ``gramian``, shape (rows, rows), parameter by parameter."""

    gramian: Tensor
    in_order: ClassVar[bool] = False
    reads_terms: ClassVar[bool] = False

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if len(uses) == 1:
            uses[0].add_to(self.gramian)
            return
        for _, rows in summed_parts(uses):
            add_product(self.gramian, rows)

    def empty(self) -> Self:
        return type(self)(torch.zeros_like(self.gramian))

    def add(self, other: Self) -> None:
        self.gramian.add_(other.gramian)

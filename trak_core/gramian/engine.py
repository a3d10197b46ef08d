"""The Gramian of a Jacobian, without the Jacobian."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from trak_core.errors import InputError
from trak_core.gramian.batched import add_split
from trak_core.gramian.graph import trace
from trak_core.gramian.layout import layout_at
from trak_core.gramian.plan import make_plan
from trak_core.gramian.rows import add_rows
from trak_core.gramian.rules import MixedSamplesError


class Engine:
    """Computes J J^T, J the Jacobian of an output with respect to the parameters of modules.

    The engine reads the computation graph that a forward pass has left. It hangs nothing on the
    modules, keeps nothing from one call to the next, and leaves the graph as it was, for
    ``output.backward(weights)`` for instance. Nobody's ``.grad`` changes. The Gramian is that of
    the forward pass that was made, dropout and all.

    With ``batch_dim`` one backward pass serves all samples as far as the graph says which entries
    of a tensor belong to which sample. Where a parameter comes in, the inner products of the
    samples' gradients come from the saved inputs and the gradients of the outputs: for linear
    layers, convolutions, embeddings, normalisation layers, and parameters that are added or
    multiplied. Any other operation is differentiated once for each sample, and what lies below an
    operation that the engine cannot see through, a recurrent layer say, as without ``batch_dim``;
    that takes longer, but the result is the same.

    Without it all rows of the Jacobian go through the graph at a time, parameter by parameter.

    Args:
        modules: Their parameters, and those of their children, count if ``requires_grad``. None may
            be part of another.
        batch_dim: The dimension of the output along which samples are independent: the entries of
            sample b depend on sample b of the data alone. None if there is none.

    Raises:
        InputError: If there is no module, or if one is part of another.

    Source: Quinton and Rey, "Jacobian Descent for Multi-Objective Optimization", arXiv 2406.16232,
    section 6, for what the Gramian is good for. The way it is computed here is our own.
    """

    def __init__(self, *modules: nn.Module, batch_dim: int | None = None):
        """See the class."""
        if not modules:
            raise InputError("The engine needs at least one module. Found none.")
        for i, module in enumerate(modules):
            for j, other in enumerate(modules):
                if i != j and any(part is module for part in other.modules()):
                    raise InputError(
                        "None of the engine's modules may be part of another, or be there twice. "
                        f"Found {type(module).__name__} (number {i + 1}) in "
                        f"{type(other).__name__} (number {j + 1}). Leave the inner one out: its "
                        "parameters count as parameters of the outer one."
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
        if not (isinstance(output, Tensor) and output.requires_grad):
            found = "no gradient" if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                "The output must be a tensor with a graph, that is with requires_grad. "
                f"Found {found}. Call the modules outside of torch.no_grad(), and don't detach."
            )
        n = output.numel()
        gramian = output.new_zeros(n, n).detach()
        with torch.no_grad():
            if self._batch_dim is None:
                self._by_rows(gramian, output)
                order = list(range(output.ndim))
            else:
                order = self._by_samples(gramian, output)
        shape = [output.shape[dim] for dim in order]
        back = [order.index(dim) for dim in range(output.ndim)]
        ahead = [output.ndim + dim for dim in reversed(back)]
        return gramian.view(shape + shape).permute(back + ahead)

    def _by_rows(self, gramian: Tensor, output: Tensor) -> None:
        edge = get_gradient_edge(output)
        parameters = list(trace([edge.node], self._parameters()).parameters.values())
        if parameters and output.numel():
            rows = torch.eye(len(gramian), dtype=output.dtype, device=output.device)
            add_rows(gramian, [edge], [rows.view(-1, *output.shape)], parameters, {})

    def _by_samples(self, gramian: Tensor, output: Tensor) -> list[int]:
        """Fill the Gramian, its rows running over the dimensions in the order returned."""
        dim = self._checked_dim(output)
        n_samples = output.shape[dim]
        n_each = len(gramian) // n_samples if n_samples else 0
        edge = get_gradient_edge(output)
        graph = trace([edge.node], self._parameters())
        layout = layout_at(output.shape, dim, 1, n_samples) if n_samples > 1 else None
        if layout is not None and graph.order:
            try:
                plan = make_plan(graph, {(edge.node, edge.output_nr): layout}, n_samples)
            except MixedSamplesError:
                raise InputError(self._explain_mixing()) from None
            if edge.node in plan.layouts:
                ones = torch.eye(n_each, dtype=output.dtype, device=output.device)
                others = [size for i, size in enumerate(output.shape) if i != dim]
                rows = ones.view(n_each, *others).unsqueeze(dim + 1)
                rows = rows.expand(n_each, *output.shape)
                add_split(gramian, edge, rows, plan, n_samples)
                return [*(i for i in range(output.ndim) if i != dim), dim]
        self._by_rows(gramian, output)
        return list(range(output.ndim))

    def _parameters(self) -> list[nn.Parameter]:
        return [
            parameter
            for module in self._modules
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def _checked_dim(self, output: Tensor) -> int:
        dim = self._batch_dim
        assert dim is not None
        if not -output.ndim <= dim < output.ndim:
            raise InputError(
                f"The output must have the dimension batch_dim = {dim}. Found an output of shape "
                f"{tuple(output.shape)}. Give one output or loss a sample, with "
                'reduction="none" for instance, or leave batch_dim out.'
            )
        return dim % output.ndim

    def _explain_mixing(self) -> str:
        names = [
            f"{name or 'the module itself'} ({type(part).__name__})"
            for module in self._modules
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        ]
        found = ", ".join(names) or "a batch normalisation"
        return (
            "With batch_dim, samples must be independent. Found statistics over the samples in "
            f"{found}. Put it in evaluation mode before the forward pass, replace it (by GroupNorm "
            "or InstanceNorm, say), or leave batch_dim out, which is right for any model but slower."
        )

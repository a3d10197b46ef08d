"""The Gramian of the gradients with respect to given parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from trak_core.errors import InputError
from trak_core.one_pass.batched import add_split
from trak_core.one_pass.graph import trace
from trak_core.one_pass.layout import layout_at
from trak_core.one_pass.plan import make_plan
from trak_core.one_pass.rows import add_rows


def parameter_gramian(
    output: Tensor, parameters: Sequence[Tensor], batch_dim: int | None
) -> Tensor:
    """Return J J^T, J the Jacobian of an output with respect to parameters.

    Args:
        output: Real numbers with a graph, of any shape [m1, ..., mk]; the graph stays.
        parameters: Leaves of graphs; one that is given twice counts once.
        batch_dim: The dimension of the output along which samples are independent, or None.

    Returns:
        Shape [m1, ..., mk, mk, ..., m1], the output's dtype, on its device.

    Raises:
        InputError: If the output has no graph, or no dimension ``batch_dim``.
        MixedSamplesError: If an operation takes statistics over independent samples.
        RuntimeError: If an operation of the graph cannot be differentiated.
    """
    if not (isinstance(output, Tensor) and output.requires_grad):
        found = "no gradient" if isinstance(output, Tensor) else type(output).__name__
        raise InputError(
            "The output must be a tensor with a graph, that is with requires_grad. "
            f"Found {found}. Call the modules outside of torch.no_grad(), and don't detach."
        )
    n = output.numel()
    order = list(range(output.ndim))
    gramian = output.detach().new_zeros(n, n)
    with torch.no_grad():
        if batch_dim is None:
            _add_by_rows(gramian, output, parameters)
        else:
            dim = _checked_dim(output, batch_dim)
            if _add_by_samples(gramian, output, parameters, dim):
                order.append(order.pop(dim))
            else:
                _add_by_rows(gramian, output, parameters)
    shape = [output.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(output.ndim)]
    ahead = [output.ndim + dim for dim in reversed(back)]
    return gramian.view(shape + shape).permute(back + ahead)


def _add_by_rows(gramian: Tensor, output: Tensor, parameters: Sequence[Tensor]) -> None:
    edge = get_gradient_edge(output)
    reached = list(trace([edge.node], parameters).parameters.values())
    if reached and output.numel():
        rows = torch.eye(len(gramian), dtype=output.dtype, device=output.device)
        add_rows(gramian, [edge], [rows.view(-1, *output.shape)], reached, {})


def _add_by_samples(
    gramian: Tensor, output: Tensor, parameters: Sequence[Tensor], dim: int
) -> bool:
    """Take the fast path if there is one; rows run over the other dimensions, then the samples."""
    n_samples = output.shape[dim]
    if n_samples < 2:
        return False
    edge = get_gradient_edge(output)
    graph = trace([edge.node], parameters)
    layout = layout_at(output.shape, dim, 1, n_samples)
    if layout is None or not graph.order:
        return False
    plan = make_plan(graph, {(edge.node, edge.output_nr): layout}, n_samples)
    if edge.node not in plan.layouts:
        return False
    others = [size for i, size in enumerate(output.shape) if i != dim]
    n_each = len(gramian) // n_samples
    rows = torch.eye(n_each, dtype=output.dtype, device=output.device).view(n_each, *others)
    rows = rows.unsqueeze(dim + 1).expand(n_each, *output.shape)
    add_split(gramian, edge, rows, plan, n_samples)
    return True


def _checked_dim(output: Tensor, batch_dim: int) -> int:
    if not -output.ndim <= batch_dim < output.ndim:
        raise InputError(
            f"The output must have the dimension batch_dim = {batch_dim}. Found an output of shape "
            f"{tuple(output.shape)}. Give one output or loss a sample, with "
            'reduction="none" for instance, or leave batch_dim out.'
        )
    return batch_dim % output.ndim

"""From outputs to who takes their gradients: by one pass for all samples, or row by row."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from trak_core.one_pass.batched import take_split
from trak_core.one_pass.consumer import Consumer
from trak_core.one_pass.graph import trace
from trak_core.one_pass.layout import layout_at
from trak_core.one_pass.plan import Plan, make_plan
from trak_core.one_pass.rows import take_rows


def by_rows(consumer: Consumer, output: Tensor, parameters: Sequence[Tensor]) -> None:
    """Hand over the gradients of each entry of an output, in row-major order.

    Args:
        consumer: Takes them.
        output: Of any shape, with a graph, which stays.
        parameters: What to differentiate with respect to.
    """
    edge = get_gradient_edge(output)
    reached = list(trace([edge.node], parameters).parameters.values())
    if reached and output.numel():
        rows = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
        take_rows(consumer, [edge], [rows.view(-1, *output.shape)], reached, {})


def plan_of(output: Tensor, parameters: Sequence[Tensor], dim: int) -> Plan | None:
    """Find out how one pass serves all samples.

    Args:
        output: With a graph, and at least two samples along ``dim``.
        parameters: What to differentiate with respect to.
        dim: The dimension along which samples are independent.

    Returns:
        The plan; None if samples can't be told apart, or if there is nothing to differentiate.

    Raises:
        MixedSamplesError: If an operation takes statistics over the samples.
    """
    n_samples = output.shape[dim]
    if n_samples < 2:
        return None
    edge = get_gradient_edge(output)
    graph = trace([edge.node], parameters)
    layout = layout_at(output.shape, dim, 1, n_samples)
    if layout is None or not graph.order:
        return None
    plan = make_plan(graph, {(edge.node, edge.output_nr): layout}, n_samples)
    return plan if edge.node in plan.layouts else None


def by_samples(
    consumer: Consumer, output: Tensor, plan: Plan, dim: int, *, keep_graph: bool
) -> None:
    """Hand over gradients by one pass; rows run over the other dimensions, then the samples.

    Args:
        consumer: Takes them.
        output: With a graph.
        plan: Of this output and dimension.
        dim: The samples'.
        keep_graph: Whether the graph must stay; it takes the memory of the activations.

    Raises:
        GraphNeededError: If it does not stay, and is needed; the consumer has taken a part then.
    """
    others = [size for i, size in enumerate(output.shape) if i != dim]
    n_samples = output.shape[dim]
    n_each = output.numel() // n_samples
    if n_each == 1:
        # Of a sum torch makes the gradient itself. To compare the shape of one that it is given, it
        # imports sympy, which takes longer than a small job's passes.
        with torch.enable_grad():
            total = get_gradient_edge(output.sum())
        take_split(consumer, total, None, plan, n_samples, keep_graph=keep_graph)
        return
    rows = torch.eye(n_each, dtype=output.dtype, device=output.device).view(n_each, *others)
    rows = rows.unsqueeze(dim + 1).expand(n_each, *output.shape)
    take_split(consumer, get_gradient_edge(output), rows, plan, n_samples, keep_graph=keep_graph)

"""Read autograd's graph between outputs and parameters, and say which sample an entry belongs to.

A layout s says that the entry at row-major position i belongs to sample (i // s) % B. A reshape
keeps it, because it keeps positions; everything else is arithmetic on the dimension it lies in.
``None`` stands for a tensor that all samples share, or whose layout is unknown. Then no entry is
attributed to one sample alone, which costs time but is never wrong.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# A node of autograd's graph: it turns gradients of its outputs into gradients of its inputs. Nodes
# of user-defined functions share no base class with the others.
Node = Any


@dataclass(frozen=True, slots=True)
class Edge:
    """Input ``index`` of ``user`` is output ``number`` of ``node``."""

    user: Node
    index: int
    node: Node
    number: int


@dataclass(frozen=True, slots=True)
class Graph:
    """The part of autograd's graph that leads from outputs to chosen parameters.

    Attributes:
        order: The nodes from which a chosen parameter is reached; users come before what they use.
        edges: The edges among them, for each user in the order of its inputs.
        parameters: The chosen parameters, by the node that stands for them.
    """

    order: list[Node]
    edges: dict[Node, list[Edge]]
    parameters: dict[Node, Tensor]


def name_of(node: Node) -> str:
    """Return what a node differentiates: ``Addmm`` for ``AddmmBackward0``."""
    return node.name().partition("Backward")[0]


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of one output of a node."""
    return tuple(node._input_metadata[number].shape)


def is_function(node: Node) -> bool:
    """Whether the node belongs to a user-defined ``torch.autograd.Function``."""
    return hasattr(node, "saved_tensors")


def leaf_of(node: Node) -> Tensor | None:
    """Return the tensor that a node collects gradients for, if it is such a node."""
    return node.variable if node.name().endswith("AccumulateGrad") else None


def trace(roots: Iterable[Node], parameters: Collection[Tensor]) -> Graph:
    """Return what leads from a graph's roots to the parameters; other parameters are constants."""
    chosen = {id(parameter) for parameter in parameters}
    leaves: dict[Node, Tensor] = {}
    edges: dict[Node, list[Edge]] = {}
    finished: list[Node] = []  # a node comes before its users
    seen: set[Node] = set()
    # Not recursive: graphs of recurrent networks are deeper than Python's stack.
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if not done:
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            stack.extend((edge.node, False) for edge in _used(node))
            continue
        leading = [edge for edge in _used(node) if edge.node in edges]
        leaf = leaf_of(node)
        if leaf is not None and id(leaf) in chosen:
            leaves[node] = leaf
        if leading or node in leaves:
            edges[node] = leading
            finished.append(node)
    return Graph(finished[::-1], edges, leaves)


def _used(node: Node) -> list[Edge]:
    """Return the edges to what a node uses, except tensors without entries, which nothing tells."""
    return [
        Edge(node, i, used, number)
        for i, (used, number) in enumerate(node.next_functions)
        if used is not None and math.prod(shape_of(used, number))
    ]


Layout = int | None


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in entries."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def layout_at(shape: Sequence[int], dim: int, width: int, n_samples: int) -> Layout:
    """Return the layout of a tensor whose dimension ``dim`` reads as (outer, n_samples, width).

    ``width`` is the number of consecutive places of one sample. It is None where sizes don't fit.
    """
    if not 0 <= dim < len(shape) or shape[dim] % (n_samples * width) or not shape[dim]:
        return None
    return width * math.prod(shape[dim + 1 :])


def locate(shape: Sequence[int], layout: int, n_samples: int) -> tuple[int, int] | None:
    """Return dimension and width as ``layout_at`` takes them; None if samples span dimensions."""
    for dim, stride in enumerate(strides(shape)):
        if stride <= layout < stride * shape[dim]:
            width = layout // stride
            if layout % stride or shape[dim] % (width * n_samples):
                return None
            return dim, width
    return None

"""Read autograd's graph between outputs and parameters."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
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


def differentiate(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a node's inputs from those of some outputs; the others have none."""
    own: list[Tensor | None] = [None] * len(node._input_metadata)
    if is_function(node):
        # They get zeros for outputs without a gradient, unlike the others.
        own = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata]
    for number, gradient in gradients.items():
        own[number] = gradient
    answers = node.apply(*own) if is_function(node) else node(*own)
    return answers if isinstance(answers, tuple) else (answers,)


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

"""Read autograd's graph between outputs and parameters, and say which sample its entries belong to.

A layout of stride s says that the entry at row-major position i belongs to sample (i // s) % B. One
with owners, n numbers, says that it belongs to sample owners[(i // s) % n], or to none where that
is -1, because nothing that is differentiated depends on it. A reshape keeps a layout, because it
keeps positions; everything else is arithmetic on the dimension it lies in. ``None`` stands for a
tensor that all samples share, or whose layout is unknown. Then no entry is attributed to one sample
alone, which costs time but is never wrong.

Layouts come from rules (``sample_owner_rules.py``), or by trial: ``probed_layouts``.
"""

import math
import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# A node of autograd's graph: it turns gradients of its outputs into gradients of its inputs. Nodes
# of user-defined functions share no base class with the others.
Node = Any


@dataclass(slots=True, eq=False)  # not frozen: a pass makes many, which takes thrice the time
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
        parameters: For nodes of chosen parameters, their places among them.
    """

    order: list[Node]
    edges: dict[Node, list[Edge]]
    parameters: dict[Node, int]


def name_of(node: Node) -> str:
    """Return what a node differentiates: ``Addmm`` for ``AddmmBackward0``."""
    return node.name().partition("Backward")[0]


class UnreadableGraphError(Exception):
    """One pass for all samples can't read the graph; the message goes on from "it"."""


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of one output of a node, or raise ``UnreadableGraphError``."""
    return _shape(node._input_metadata[number])


def _shape(metadata: Any) -> tuple[int, ...]:
    if metadata.is_nested_tensor:
        raise UnreadableGraphError(
            "has nested tensors in it, which have no shape that all samples share"
        )
    return tuple(metadata.shape)


def is_function(node: Node) -> bool:
    """Whether the node belongs to a user-defined ``torch.autograd.Function``."""
    return hasattr(node, "saved_tensors")


# How the names of nodes end that collect gradients for a tensor.
_LEAF = "AccumulateGrad"


def leaf_of(node: Node) -> Tensor | None:
    """Return the tensor that a node collects gradients for, if it is such a node."""
    return node.variable if node.name().endswith(_LEAF) else None


def differentiate(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a node's inputs from those of some outputs; the others have none.

    Sparse ones are made dense.
    """
    own: list[Tensor | None] = [None] * len(node._input_metadata)
    if is_function(node):
        # They get zeros for outputs without a gradient, unlike the others.
        own = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata]
    for number, gradient in gradients.items():
        own[number] = gradient
    answers = node.apply(*own) if is_function(node) else node(*own)
    answers = answers if isinstance(answers, tuple) else (answers,)
    if is_function(node):
        # They answer for every argument, tensor or not; a node has inputs for tensors alone.
        pairs = zip(answers, node.needs_input_grad, strict=False)
        needed = iter([answer for answer, is_needed in pairs if is_needed])
        answers = tuple(used and next(needed) for used, _ in node.next_functions)
    return tuple(None if answer is None else answer.to_dense() for answer in answers)


def nodes_below(root: Node) -> list[Node]:
    """Return all nodes of a graph in an order that its structure decides, the root first."""
    seen: dict[Node, None] = {root: None}
    stack = [root]
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in seen:
                seen[used] = None
                stack.append(used)
    return list(seen)


# Settings of operations that rules for layouts may read; a signature has them.
SETTINGS = (
    "dim",
    "dims",
    "dim0",
    "dim1",
    "keepdim",
    "pad",
    "normalized_shape",
    "training",
    "stride",
)


@lru_cache(maxsize=512)
def _settings_of(kind: type) -> tuple[str, ...]:
    names = (f"_saved_{name}" for name in SETTINGS)
    return tuple(name for name in names if hasattr(kind, name))


def signature(root: Node, parameters: Sequence[Tensor]) -> tuple[list[Node], Hashable]:
    """Return a graph's nodes, the root first, and all that decides who owns the entries there.

    That is of each node in turn its name, its settings, the shapes of its outputs and what it uses,
    and which of the chosen parameters it stands for, and whether that has hooks. Only values of
    tensors that operations have saved are left out. Equal signatures number nodes alike.
    """
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    nodes, parts = [root], list[Hashable]()
    number: dict[Node | None, int] = {root: 0}
    for node in iter(nodes):  # which grow
        name, functions, outputs = node.name(), node.next_functions, node._input_metadata
        settings = _settings_of(type(node))
        parts += (name, len(functions), len(outputs))
        parts.append(settings and tuple([getattr(node, setting) for setting in settings]))
        if name.endswith(_LEAF):
            parts += (place.get(id(node.variable)), bool(node.variable._backward_hooks))
        for used, output in functions:
            if used is not None and used not in number:
                number[used] = len(nodes)
                nodes.append(used)
            parts += (number.get(used), output)
        parts += map(_shape, outputs)
    return nodes, tuple(parts)


def trace(roots: Iterable[Node], parameters: Collection[Tensor]) -> Graph:
    """Return what leads from a graph's roots to the parameters; other parameters are constants."""
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    leaves: dict[Node, int] = {}
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
        if leaf is not None and id(leaf) in place:
            leaves[node] = place[id(leaf)]
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


# Owners of two layouts are compared block by block, up to so many.
_MOST_BLOCKS = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which sample an entry belongs to.

    Attributes:
        stride: Consecutive entries with one owner.
        n_samples: B.
        owners: Shape (n,), on the CPU; None if all samples take turns.
    """

    stride: int
    n_samples: int
    owners: Tensor | None = None

    @property
    def period(self) -> int:
        """Number of blocks of ``stride`` entries until the owners repeat."""
        return self.n_samples if self.owners is None else len(self.owners)

    @property
    def in_turn(self) -> Tensor:
        """The owners of one period, shape (period,)."""
        return torch.arange(self.n_samples) if self.owners is None else self.owners

    def of_blocks(self, stride: int, n_blocks: int) -> Tensor:
        """Return the owners of the first blocks of ``stride`` entries, which divides the layout's.

        Shape (n_blocks,).
        """
        each = self.in_turn.repeat_interleave(self.stride // stride)
        return each.repeat(-(-n_blocks // len(each)))[:n_blocks]


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in entries."""
    return list(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else []


def stride_at(shape: Sequence[int], dim: int, width: int, period: int) -> int | None:
    """Return the stride of a layout in a tensor whose dimension ``dim`` is (outer, period, width).

    ``width`` is the number of consecutive places of one owner. It is None where sizes don't fit.
    """
    if not 0 <= dim < len(shape) or shape[dim] % (period * width) or not shape[dim]:
        return None
    return width * math.prod(shape[dim + 1 :])


def locate(shape: Sequence[int], layout: Layout) -> tuple[int, int] | None:
    """Return dimension and width as ``stride_at`` takes them; None if owners span dimensions.

    All that there is belongs to a single sample.
    """
    if layout.n_samples == 1:
        return 0, 1
    for dim, stride in enumerate(strides(shape)):
        if stride <= layout.stride and layout.stride * layout.period <= stride * shape[dim]:
            width = layout.stride // stride
            if layout.stride % stride or shape[dim] % (width * layout.period):
                return None
            return dim, width
    return None


def joined(a: Layout | None, b: Layout | None) -> Layout | None:
    """Return a layout that agrees with two of one tensor, by different users of it.

    None if they give an entry to different samples, because no entry below belongs to one alone.
    """
    if a is None or b is None:
        return None
    if a.owners is None and b.owners is None:
        return a if a.stride == b.stride else None
    stride = math.gcd(a.stride, b.stride)
    n = math.lcm(a.stride * a.period, b.stride * b.period) // stride
    if n > _MOST_BLOCKS:
        return None
    first, second = a.of_blocks(stride, n), b.of_blocks(stride, n)
    if bool(((first != second) & (first >= 0) & (second >= 0)).any()):
        return None
    return Layout(stride, a.n_samples, torch.where(first >= 0, first, second))


def settled(layout: Layout | None) -> Layout | None:
    """Return the same layout in short, if samples take turns; else the layout itself."""
    if layout is None or layout.owners is None or bool((layout.owners < 0).any()):
        return layout
    return guessed(layout)


def guessed(layout: Layout) -> Layout:
    """Return a layout in which samples take turns, if one agrees where an entry has an owner.

    Else the layout itself. Gradients are zero where it has none, so that a guess there is never
    wrong; but it may contradict another user of the tensor.
    """
    if layout.owners is None:
        return layout
    n, b = len(layout.owners), layout.n_samples
    for width in range(n // b, 0, -1):
        if n % (width * b) == 0:
            blocks = layout.owners.view(-1, b, width)
            if bool(((blocks < 0) | (blocks == torch.arange(b)[:, None])).all()):
                return Layout(layout.stride * width, b)
    return layout


def layout_of(owners: Tensor, stride: int, n_samples: int) -> Layout | None:
    """Return the layout of a tensor from the owners of its blocks of ``stride`` entries.

    ``owners``, on the CPU, has the dimensions before those blocks. The layout repeats itself over
    the outer ones if it can.
    """
    while owners.ndim > 1:
        repeats = bool((owners == owners[:1]).all())
        owners = owners[0] if repeats else owners.flatten(0, 1)
    return Layout(stride, n_samples, owners.reshape(-1))


def from_entries(owners: Tensor, n_samples: int) -> Layout | None:
    """Return the layout of a tensor from the owner of each entry, -1 where it has none."""
    if not owners.ndim:
        return None
    for dim, stride in enumerate(strides(owners.shape)):
        blocks = owners.reshape(*owners.shape[: dim + 1], stride)
        largest = blocks.amax(-1)
        if bool(((blocks < 0) | (blocks == largest.unsqueeze(-1))).all()):
            return layout_of(largest, stride, n_samples)
    return None


def probed_layouts(edges: list[Edge], layouts: dict[int, Layout]) -> list[Layout | None]:
    """Return the layouts of an operation's inputs, from those of its outputs, by derivatives.

    Samples have numbers. For each bit there are two probes: random gradients of the samples with
    that bit, and of those without. An entry of an input belongs to sample b if it moves in exactly
    the probes in which b is, so that an operation that mixes samples is never taken for one that
    doesn't. An entry that never moves depends on nobody: the operation's derivative is zero there.
    Edges are all those of one operation; layouts those of the outputs that are used, by number. A
    layout is None where an entry moves with several samples.
    """
    user = edges[0].user
    n_samples = next(iter(layouts.values())).n_samples
    owners = {edge.index: torch.zeros(shape_of(edge.node, edge.number)).long() for edge in edges}
    moves = {index: torch.zeros_like(own, dtype=torch.bool) for index, own in owners.items()}
    shared: set[int] = set()
    for bit in range((n_samples - 1).bit_length()):
        with_bit = (torch.arange(n_samples) >> bit) % 2 == 1
        first, second = (_moved(user, layouts, which, owners) for which in (with_bit, ~with_bit))
        for index, own in owners.items():
            own += first[index].long() << bit
            moves[index] |= first[index] | second[index]
            if bool((first[index] & second[index]).any()):
                shared.add(index)
    return [
        None if i in shared else from_entries(torch.where(moves[i], owners[i], -1), n_samples)
        for i in (edge.index for edge in edges)
    ]


def _moved(
    user: Node, layouts: dict[int, Layout], which: Tensor, inputs: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return which entries of inputs move with the samples for which ``which`` is true."""
    generator = torch.Generator().manual_seed(0)
    gradients: dict[int, Tensor] = {}
    for number, layout in layouts.items():
        about = user._input_metadata[number]
        n_entries = math.prod(about.shape)
        own = layout.of_blocks(layout.stride, n_entries // layout.stride)
        chosen = (which[own] & (own >= 0)).repeat_interleave(layout.stride)
        random = 1 + torch.rand(n_entries, generator=generator)
        gradient = torch.where(chosen, random, 0).view(shape_of(user, number))
        gradients[number] = gradient.to(about.device, about.dtype)
    with torch.no_grad():
        answers = differentiate(user, gradients)
    moved = {}
    for index, like in inputs.items():
        answer = answers[index]
        if answer is None:
            moved[index] = torch.zeros_like(like, dtype=torch.bool)
        else:
            moved[index] = (answer.sum_to_size(like.shape) != 0).cpu()
    return moved

"""Read autograd's graph, and determine to which sample each entry of a tensor belongs.

A *layout* assigns the entries of a tensor to the B samples of a batch. With stride s, the entry at
row-major position i belongs to sample (i // s) mod B. If the layout has ``owners``, a list of n
sample numbers, the entry belongs to sample owners[(i // s) mod n]. The number -1 marks entries on
which no model output depends. A reshape keeps row-major positions and therefore the layout. Other
operations may change the dimension along which the samples lie.

The layout of a tensor is None if several samples share the tensor, or if it is unknown to which
samples the entries belong. A layout that is None can cost time but never gives a wrong gradient.

BackPACK and Opacus hook ``nn.Module``s and need a rule for each kind of layer. Here the nodes of
autograd's graph are read, so functional code and parameters outside of layers need no special
handling. BackPACK and Opacus also assume that dimension 0 is the batch. Here the batch dimension is
derived, so samples may lie along any dimension, share it with another index, or be gathered by
indices.
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

# A node of autograd's graph: an operation, which computes the gradients of its inputs from those of
# its outputs. The type is Any, because nodes of user-defined functions and other nodes have no
# common base class.
Node = Any


class UnreadableGraphError(Exception):
    """One backward pass can't differentiate a batch, because it can't read autograd's graph.

    The message completes a sentence whose subject is the model, such as "has nested tensors".
    """


@dataclass(slots=True, eq=False)  # not frozen, because that triples the time to create one
class Edge:
    """An edge of autograd's graph: input ``index`` of ``user`` is output ``number`` of ``node``."""

    user: Node
    index: int
    node: Node
    number: int


@dataclass(frozen=True, slots=True)
class Graph:
    """The part of autograd's graph that leads from outputs to chosen parameters."""

    order: list[Node]  # nodes; every node precedes the nodes that compute its inputs
    edges: dict[Node, list[Edge]]  # edges to other nodes of ``order``, sorted by input index
    parameters: dict[Node, int]  # maps the nodes of chosen parameters to the parameters' indices


def name_of(node: Node) -> str:
    """Return the operation that a node differentiates: ``Addmm`` for ``AddmmBackward0``."""
    return node.name().partition("Backward")[0]


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of output ``number`` of a node. An error is raised for nested tensors."""
    return _shape(node._input_metadata[number])


def _shape(metadata: Any) -> tuple[int, ...]:
    if metadata.is_nested_tensor:
        raise UnreadableGraphError("has nested tensors, whose samples have no common shape")
    return tuple(metadata.shape)


def is_function(node: Node) -> bool:
    """Return whether the node belongs to a user-defined ``torch.autograd.Function``."""
    return hasattr(node, "saved_tensors")


# Suffix of the names of nodes that accumulate the gradient of a leaf tensor.
_LEAF = "AccumulateGrad"


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf tensor whose gradient a node accumulates, or None for any other node."""
    return node.variable if node.name().endswith(_LEAF) else None


def differentiate(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a node's inputs, given the gradients of some of its outputs.

    The gradient is zero for outputs that are not in ``gradients``, which maps output numbers to
    tensors. Sparse results are converted to dense ones.
    """
    of_outputs: list[Tensor | None] = [None] * len(node._input_metadata)
    if is_function(node):
        # For a missing gradient, user-defined functions expect zeros, and other nodes expect None.
        of_outputs = [
            torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata
        ]
    for number, gradient in gradients.items():
        of_outputs[number] = gradient
    answers = node.apply(*of_outputs) if is_function(node) else node(*of_outputs)
    answers = answers if isinstance(answers, tuple) else (answers,)
    if is_function(node):
        # ``apply`` returns a gradient or None for each argument of ``forward``. The graph has an
        # input only for each tensor among them, so results for other arguments are dropped.
        pairs = zip(answers, node.needs_input_grad, strict=False)
        needed = iter([answer for answer, is_needed in pairs if is_needed])
        answers = tuple(used and next(needed) for used, _ in node.next_functions)
    return tuple(None if answer is None else answer.to_dense() for answer in answers)


def nodes_below(root: Node) -> list[Node]:
    """Return ``root`` and all nodes to which it leads, in a reproducible order."""
    seen: dict[Node, None] = {root: None}
    stack = [root]
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in seen:
                seen[used] = None
                stack.append(used)
    return list(seen)


# Names of settings that operations save and that rules for layouts read, such as ``dim``. A graph's
# ``signature`` contains the settings, so that graphs with equal signatures have equal layouts.
SETTINGS = (
    *("dim", "dims", "dim0", "dim1", "keepdim", "pad"),
    *("normalized_shape", "training", "stride"),
)


@lru_cache(maxsize=512)
def _settings_of(kind: type) -> tuple[str, ...]:
    names = (f"_saved_{name}" for name in SETTINGS)
    return tuple(name for name in names if hasattr(kind, name))


def signature(root: Node, parameters: Sequence[Tensor]) -> tuple[list[Node], Hashable]:
    """Return the nodes of the graph below ``root``, and a hashable key of its structure.

    If two graphs have equal keys, their nodes correspond in this order, and have equal layouts
    unless those depend on saved values. The key has the name, settings, output shapes and edges of
    each node. For a leaf tensor, it has the index in ``parameters`` and whether there are hooks.
    """
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    nodes, parts = [root], list[Hashable]()
    number: dict[Node | None, int] = {root: 0}
    for node in iter(nodes):  # the loop appends to ``nodes``
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
    """Return the part of the graph below ``roots`` that leads to ``parameters``."""
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    leaves: dict[Node, int] = {}
    edges: dict[Node, list[Edge]] = {}
    finished: list[Node] = []  # each node comes before its users
    seen: set[Node] = set()
    # A stack is used, because recursion over the graph of a recurrent network would exceed Python's
    # recursion limit.
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_expanded = stack.pop()
        if not is_expanded:
            if node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((edge.node, False) for edge in _edges_of(node))
            continue
        leading = [edge for edge in _edges_of(node) if edge.node in edges]
        leaf = leaf_of(node)
        if leaf is not None and id(leaf) in place:
            leaves[node] = place[id(leaf)]
        if leading or node in leaves:
            edges[node] = leading
            finished.append(node)
    return Graph(finished[::-1], edges, leaves)


def _edges_of(node: Node) -> list[Edge]:
    """Return the edges to a node's inputs, except inputs without entries, which have no layout."""
    return [
        Edge(node, i, used, number)
        for i, (used, number) in enumerate(node.next_functions)
        if used is not None and math.prod(shape_of(used, number))
    ]


# Two layouts are compared block by block, unless there are more blocks than this. The comparison
# would then take too long, and the tensor counts as shared by all samples.
_MOST_BLOCKS = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The assignment of a tensor's entries to samples.

    The entry at row-major position i belongs to sample owners[(i // stride) mod len(owners)].
    """

    stride: int  # number of consecutive entries that belong to one sample
    n_samples: int
    # Sample numbers on the CPU, shape (n,), where -1 means no sample. None means 0, 1, ...,
    # n_samples - 1, in which case the layout is *cyclic*.
    owners: Tensor | None = None

    @property
    def period(self) -> int:
        """Number of consecutive blocks of ``stride`` entries after which the samples repeat."""
        return self.n_samples if self.owners is None else len(self.owners)

    @property
    def in_turn(self) -> Tensor:
        return torch.arange(self.n_samples) if self.owners is None else self.owners

    def of_blocks(self, stride: int, n_blocks: int) -> Tensor:
        """Return the sample numbers of the first ``n_blocks`` blocks of ``stride`` entries.

        The given stride must divide the layout's, so that a block belongs to one sample.
        """
        each = self.in_turn.repeat_interleave(self.stride // stride)
        return each.repeat(-(-n_blocks // len(each)))[:n_blocks]


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in entries."""
    return list(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else []


def stride_at(shape: Sequence[int], dim: int, width: int, period: int) -> int | None:
    """Return the stride of a layout whose samples lie along dimension ``dim`` of a tensor.

    Each block of ``width`` consecutive indices belongs to one sample, and the samples repeat after
    ``period`` blocks. Return None if the dimension's size is not a multiple of period x width.
    """
    if not 0 <= dim < len(shape) or shape[dim] % (period * width) or not shape[dim]:
        return None
    return width * math.prod(shape[dim + 1 :])


def locate(shape: Sequence[int], layout: Layout) -> tuple[int, int] | None:
    """Return the dimension of a tensor along which a layout's samples lie, and their width.

    The width is the number of consecutive indices of the dimension that belong to one sample.
    Return None if the samples lie along several dimensions, and (0, 1) for a single sample.
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
    """Return the combination of two layouts of one tensor, derived from two operations that use it.

    Return None if the layouts assign an entry to different samples, because the entry's gradient is
    then a sum over both samples. An entry that one layout assigns to no sample belongs to the
    sample of the other layout.
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
    """Return a layout in cyclic form if that is possible and every entry belongs to a sample."""
    if layout is None or layout.owners is None or bool((layout.owners < 0).any()):
        return layout
    return guessed(layout)


def guessed(layout: Layout) -> Layout:
    """Return a cyclic layout that agrees with ``layout`` for all entries that belong to a sample.

    Entries that belong to no sample have gradient zero, so that it is never wrong to assign them to
    one. However, the result may contradict the layout that is derived from another operation that
    uses the tensor. If there is no such cyclic layout, return ``layout``.
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
    """Return the layout of a tensor whose blocks of ``stride`` entries belong to given samples.

    ``owners``, the sample numbers of the blocks, is on the CPU and has the shape of the tensor's
    leading dimensions. Leading dimensions along which it repeats are left out of the layout.
    """
    while owners.ndim > 1:
        repeats = bool((owners == owners[:1]).all())
        owners = owners[0] if repeats else owners.flatten(0, 1)
    return Layout(stride, n_samples, owners.reshape(-1))


def from_entries(owners: Tensor, n_samples: int) -> Layout | None:
    """Return a tensor's layout from each entry's sample number, which is -1 for no sample."""
    for dim, stride in enumerate(strides(owners.shape)):
        blocks = owners.reshape(*owners.shape[: dim + 1], stride)
        largest = blocks.amax(-1)
        if bool(((blocks < 0) | (blocks == largest.unsqueeze(-1))).all()):
            return layout_of(largest, stride, n_samples)
    return None


def probed_layouts(edges: list[Edge], layouts: dict[int, Layout]) -> list[Layout | None]:
    """Return the layouts of an operation's inputs by differentiating it with test gradients.

    This is used for operations without a rule. Samples are numbered in binary. For each bit, the
    operation is differentiated twice: with random positive output gradients for the samples whose
    number has the bit, then for all other samples. If an input entry belongs to sample b alone, its
    gradient is nonzero only in those trials that include b, which gives the bits of b. If it is
    nonzero in both trials of a bit, several samples share the input, whose layout is then None. Two
    different samples differ in some bit, so an operation that mixes samples is always detected.
    The cost is 2 ceil(log2 B) derivatives, where one derivative for each sample would be B.
    """
    user = edges[0].user
    n_samples = next(iter(layouts.values())).n_samples
    owners = {edge.index: torch.zeros(shape_of(edge.node, edge.number)).long() for edge in edges}
    depends = {index: torch.zeros_like(own, dtype=torch.bool) for index, own in owners.items()}
    shared: set[int] = set()
    for bit in range((n_samples - 1).bit_length()):
        with_bit = (torch.arange(n_samples) >> bit) % 2 == 1
        first, second = (_nonzero(user, layouts, which, owners) for which in (with_bit, ~with_bit))
        for index, own in owners.items():
            own += first[index].long() << bit
            depends[index] |= first[index] | second[index]
            if bool((first[index] & second[index]).any()):
                shared.add(index)
    return [
        None if i in shared else from_entries(torch.where(depends[i], owners[i], -1), n_samples)
        for i in (edge.index for edge in edges)
    ]


def _nonzero(
    user: Node, layouts: dict[int, Layout], which: Tensor, inputs: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return a mask for each input: its entries that depend on samples in the mask ``which``."""
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
    masks = {}
    for index, like in inputs.items():
        answer = answers[index]
        if answer is None:
            answer = torch.zeros_like(like)
        masks[index] = (answer.sum_to_size(like.shape) != 0).cpu()
    return masks

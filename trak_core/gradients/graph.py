"""Read autograd's graph, and determine to which sample each entry of a tensor belongs.

A *layout* assigns the entries of a tensor to the B samples of a batch. With stride s, the entry at
row-major position i belongs to sample (i // s) mod B. If the layout has ``owners``, a list of n
sample numbers, the entry belongs to sample owners[(i // s) mod n]. The number -1 marks entries on
which no differentiated value depends. A reshape keeps row-major positions and therefore the layout.
Other operations may change the dimension along which the samples lie.

The layout of a tensor is None if several samples share it, or if it is unknown. Then no entry is
assigned to a sample. This can cost time but never gives a wrong gradient.

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

# A node of autograd's graph. It computes gradients of its inputs from gradients of its outputs.
# Nodes of user-defined functions have no base class in common with other nodes.
Node = Any


class UnreadableGraphError(Exception):
    """One pass can't read the graph. The message completes a sentence that begins "the model"."""


@dataclass(slots=True, eq=False)  # not frozen, because that triples the time to create one
class Edge:
    """Input ``index`` of ``user`` is output ``number`` of ``node``."""

    user: Node
    index: int
    node: Node
    number: int


@dataclass(frozen=True, slots=True)
class Graph:
    """The part of autograd's graph that leads from outputs to chosen parameters."""

    order: list[Node]  # every node precedes the nodes that compute its inputs
    edges: dict[Node, list[Edge]]  # edges to other nodes of ``order``, sorted by input index
    parameters: dict[Node, int]  # maps the nodes of chosen parameters to the parameters' indices


def name_of(node: Node) -> str:
    """Return the operation that a node differentiates: ``Addmm`` for ``AddmmBackward0``."""
    return node.name().partition("Backward")[0]


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of one output of a node, or raise ``UnreadableGraphError``."""
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

    Outputs without a gradient have gradient zero. Sparse results are converted to dense ones.
    """
    of_outputs: list[Tensor | None] = [None] * len(node._input_metadata)
    if is_function(node):
        # User-defined functions expect zeros for missing gradients, other nodes None.
        of_outputs = [
            torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata
        ]
    for number, gradient in gradients.items():
        of_outputs[number] = gradient
    answers = node.apply(*of_outputs) if is_function(node) else node(*of_outputs)
    answers = answers if isinstance(answers, tuple) else (answers,)
    if is_function(node):
        # ``apply`` returns an item for each argument, but the graph has inputs only for tensors.
        pairs = zip(answers, node.needs_input_grad, strict=False)
        needed = iter([answer for answer, is_needed in pairs if is_needed])
        answers = tuple(used and next(needed) for used, _ in node.next_functions)
    return tuple(None if answer is None else answer.to_dense() for answer in answers)


def nodes_below(root: Node) -> list[Node]:
    """Return all nodes that ``root`` leads to, the root first, in a reproducible order."""
    seen: dict[Node, None] = {root: None}
    stack = [root]
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in seen:
                seen[used] = None
                stack.append(used)
    return list(seen)


# Saved settings of operations, which rules for layouts read. Signatures include them.
SETTINGS = (
    *("dim", "dims", "dim0", "dim1", "keepdim", "pad"),
    *("normalized_shape", "training", "stride"),
)


@lru_cache(maxsize=512)
def _settings_of(kind: type) -> tuple[str, ...]:
    names = (f"_saved_{name}" for name in SETTINGS)
    return tuple(name for name in names if hasattr(kind, name))


def signature(root: Node, parameters: Sequence[Tensor]) -> tuple[list[Node], Hashable]:
    """Return a graph's nodes, and a key that determines its layouts, except for saved values.

    If two graphs have equal keys, nodes with equal numbers correspond. The key has each node's
    name, settings, output shapes and used nodes. For a leaf, it has the index of the parameter and
    whether the parameter has hooks.
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
    """Return the part of a graph that leads to ``parameters``. Other leaves are constants."""
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    leaves: dict[Node, int] = {}
    edges: dict[Node, list[Edge]] = {}
    finished: list[Node] = []  # each node comes before its users
    seen: set[Node] = set()
    # A stack replaces recursion, because graphs of recurrent networks exceed Python's limit.
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
    """Return a node's edges, except those to tensors without entries, which have no layout."""
    return [
        Edge(node, i, used, number)
        for i, (used, number) in enumerate(node.next_functions)
        if used is not None and math.prod(shape_of(used, number))
    ]


# Two layouts are compared block by block up to this number of blocks.
_MOST_BLOCKS = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The assignment of a tensor's entries to samples (see the module's docstring)."""

    stride: int  # s, the number of consecutive entries of one sample
    n_samples: int  # B
    # Sample numbers, shape (n,), on the CPU. None means 0, ..., B - 1, a *cyclic* layout.
    owners: Tensor | None = None

    @property
    def period(self) -> int:
        """Number of blocks of ``stride`` entries until the owners repeat."""
        return self.n_samples if self.owners is None else len(self.owners)

    @property
    def in_turn(self) -> Tensor:
        return torch.arange(self.n_samples) if self.owners is None else self.owners

    def of_blocks(self, stride: int, n_blocks: int) -> Tensor:
        """Return the owners of the first ``n_blocks`` blocks of ``stride`` entries.

        ``stride`` must divide the layout's stride. The result has shape (n_blocks,).
        """
        each = self.in_turn.repeat_interleave(self.stride // stride)
        return each.repeat(-(-n_blocks // len(each)))[:n_blocks]


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in entries."""
    return list(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else []


def stride_at(shape: Sequence[int], dim: int, width: int, period: int) -> int | None:
    """Return the stride of a layout whose owners lie along dimension ``dim`` of a tensor.

    The dimension is read as (outer, period, width), with ``width`` consecutive indices for each
    owner. Return None if the dimension's size is not a multiple of period x width.
    """
    if not 0 <= dim < len(shape) or shape[dim] % (period * width) or not shape[dim]:
        return None
    return width * math.prod(shape[dim + 1 :])


def locate(shape: Sequence[int], layout: Layout) -> tuple[int, int] | None:
    """Return the dimension and width for which ``stride_at`` returns the layout's stride.

    Return None if one period spans several dimensions, and (0, 1) if there is only one sample.
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
    """Return the combination of two layouts that were derived from two users of one tensor.

    Return None if the layouts assign an entry to different samples, because the entry's gradient is
    then a sum over both samples.
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
    """Return an equal cyclic layout if one exists and every entry has an owner, else ``layout``."""
    if layout is None or layout.owners is None or bool((layout.owners < 0).any()):
        return layout
    return guessed(layout)


def guessed(layout: Layout) -> Layout:
    """Return a cyclic layout that agrees for all entries with an owner, or else ``layout``.

    Entries without an owner have gradient zero. Assigning them to a sample is never wrong, but the
    result may contradict the layout that is derived from another user of the tensor.
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

    ``owners``, on the CPU, has the shape of the tensor's leading dimensions. Leading dimensions
    along which the owners repeat are left out of the layout.
    """
    while owners.ndim > 1:
        repeats = bool((owners == owners[:1]).all())
        owners = owners[0] if repeats else owners.flatten(0, 1)
    return Layout(stride, n_samples, owners.reshape(-1))


def from_entries(owners: Tensor, n_samples: int) -> Layout | None:
    """Return the layout of a tensor from the owner of each entry, where -1 means no owner."""
    for dim, stride in enumerate(strides(owners.shape)):
        blocks = owners.reshape(*owners.shape[: dim + 1], stride)
        largest = blocks.amax(-1)
        if bool(((blocks < 0) | (blocks == largest.unsqueeze(-1))).all()):
            return layout_of(largest, stride, n_samples)
    return None


def probed_layouts(edges: list[Edge], layouts: dict[int, Layout]) -> list[Layout | None]:
    """Return the layouts of an operation's inputs by differentiating it with test gradients.

    This is used for operations without a rule. Samples are numbered in binary. For each bit, the
    operation is differentiated twice: with random positive gradients for the samples whose number
    has the bit, and for all other samples. If an entry depends on sample b alone, its gradient is
    nonzero in exactly the trials that include b, which determine the bits of b. If it is nonzero in
    both trials of a bit, several samples share the input, whose layout is None. Therefore an
    operation that mixes samples is always detected. The cost is 2 ceil(log2 B) derivatives.
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
    """Return masks of the input entries that get gradients from samples in the mask ``which``."""
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

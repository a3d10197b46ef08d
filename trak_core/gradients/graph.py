"""Read autograd's graph, and determine to which sample each entry of a tensor belongs.

A *layout* assigns the entries of a tensor to the B samples of a batch. With stride s, the entry at
row-major position i belongs to sample (i // s) mod B. If the layout has ``owners``, a list of n
sample numbers, the entry belongs to sample owners[(i // s) mod n]. The number -1 marks entries on
which no model output depends. A reshape keeps row-major positions and therefore the layout. Other
operations may change the dimension along which the samples lie.

The layout of a tensor is None if several samples share the tensor, or if it is unknown which entry
belongs to which sample. Computing gradients may then take longer, but they are never wrong.

BackPACK and Opacus need a rule for each kind of ``nn.Module``, and assume that dimension 0 is the
batch. This module reads the nodes of autograd's graph instead, and derives the batch dimension.
Therefore, functional code needs no special handling. Samples may lie along any dimension, share a
dimension with another index, or be gathered by indices.
"""

import math
import operator
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# A node of autograd's graph: an operation, which computes the gradients of its inputs from those of
# its outputs. The type is Any, because nodes of torch's operations and nodes of user-defined
# functions have no common base class.
Node = Any


class UnreadableGraphError(Exception):
    """Autograd's graph doesn't allow one backward pass for all samples of a batch.

    The message is the end of a sentence about the model, such as "has nested tensors".
    """


@dataclass(slots=True, eq=False)  # not frozen, because that triples the time to create one
class Edge:
    """An edge of autograd's graph: output ``number`` of ``node`` is input ``index`` of ``user``."""

    user: Node
    index: int
    node: Node
    number: int


@dataclass(frozen=True, slots=True)
class Graph:
    """The part of autograd's graph that leads from outputs to chosen parameters."""

    order: list[Node]  # all nodes, each before the nodes that compute its inputs
    edges: dict[Node, list[Edge]]  # the edges to each node's inputs, sorted by ``index``
    parameters: dict[Node, int]  # the nodes of chosen parameters, with the parameters' indices


def name_of(node: Node) -> str:
    """Return the name of a node's operation, such as ``Addmm`` for ``AddmmBackward0``."""
    return node.name().partition("Backward")[0]


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    """Return the shape of a node's output. Raise an error if the output is a nested tensor."""
    return _shape(node._input_metadata[number])


def _shape(metadata: Any) -> tuple[int, ...]:
    if metadata.is_nested_tensor:
        raise UnreadableGraphError("has nested tensors, whose samples have no common shape")
    return tuple(metadata.shape)


def is_function(node: Node) -> bool:
    """Return whether the node belongs to a user-defined ``torch.autograd.Function``."""
    return hasattr(node, "saved_tensors")


# The nodes of leaf tensors, such as parameters, have names with this ending.
_LEAF = "AccumulateGrad"


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf tensor, such as a parameter, to which a node belongs, or None."""
    return node.variable if node.name().endswith(_LEAF) else None


def differentiate(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a node's inputs, given the gradients of some of the node's outputs.

    ``gradients`` maps output numbers to gradients. For all other outputs, the gradient is zero.
    Sparse results are converted to dense tensors.
    """
    # For a missing gradient, user-defined functions expect zeros, and other nodes expect None.
    output_gradients: list[Tensor | None] = [
        torch.zeros(m.shape, dtype=m.dtype, device=m.device) if is_function(node) else None
        for m in node._input_metadata
    ]
    for number, gradient in gradients.items():
        output_gradients[number] = gradient
    answers = node.apply(*output_gradients) if is_function(node) else node(*output_gradients)
    answers = answers if isinstance(answers, tuple) else (answers,)
    if is_function(node):
        # ``apply`` returns a gradient or None for each argument of ``forward``. Results for
        # arguments that are not tensors are dropped, because the graph has no inputs for them.
        pairs = zip(answers, node.needs_input_grad, strict=False)
        needed = iter([answer for answer, is_needed in pairs if is_needed])
        answers = tuple(used and next(needed) for used, _ in node.next_functions)
    return tuple(None if answer is None else answer.to_dense() for answer in answers)


def nodes_below(root: Node) -> list[Node]:
    """Return ``root`` and all nodes that can be reached from it, in a reproducible order."""
    seen: dict[Node, None] = {root: None}
    stack = [root]
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in seen:
                seen[used] = None
                stack.append(used)
    return list(seen)


# Names of arguments that operations save and on which layouts depend. The ``signature`` of a graph
# contains these arguments, so that graphs with equal signatures have equal layouts.
SETTINGS = (
    *("dim", "dims", "dim0", "dim1", "keepdim", "pad"),
    *("normalized_shape", "training", "stride"),
)


@lru_cache(maxsize=512)
def _settings_of(kind: type) -> tuple[str, ...]:
    names = (f"_saved_{name}" for name in SETTINGS)
    return tuple(name for name in names if hasattr(kind, name))


def signature(root: Node, parameters: Sequence[Tensor]) -> tuple[list[Node], Hashable]:
    """Return the nodes of the graph below ``root``, and a hashable key of the graph's structure.

    If two graphs have equal keys, their nodes correspond in this order, and have equal layouts
    unless layouts depend on saved values. The key contains each node's name, ``SETTINGS``, output
    shapes and edges. For a leaf tensor, the key also contains the index in ``parameters``, and
    whether the tensor has hooks.
    """
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    nodes, parts = [root], list[Hashable]()
    number: dict[Node | None, int] = {root: 0}
    for node in iter(nodes):  # the loop appends to ``nodes``
        name, functions, outputs = node.name(), node.next_functions, node._input_metadata
        settings = _settings_of(type(node))
        parts += (name, len(functions), len(outputs))
        parts.append(settings and tuple([getattr(node, setting) for setting in settings]))
        if name.endswith(_LEAF):
            parts += (index.get(id(node.variable)), bool(node.variable._backward_hooks))
        for used, output in functions:
            if used is not None and used not in number:
                number[used] = len(nodes)
                nodes.append(used)
            parts += (number.get(used), output)
        parts += map(_shape, outputs)
    return nodes, tuple(parts)


def trace(root: Node, parameters: Collection[Tensor]) -> Graph:
    """Return the part of the graph below ``root`` that leads to ``parameters``."""
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    leaves: dict[Node, int] = {}
    edges: dict[Node, list[Edge]] = {}
    finished: list[Node] = []  # each node comes before its users
    seen: set[Node] = set()
    # Recursive calls would exceed Python's recursion limit for the graph of a recurrent network.
    stack: list[tuple[Node, bool]] = [(root, False)]
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
        if leaf is not None and id(leaf) in index:
            leaves[node] = index[id(leaf)]
        if leading or node in leaves:
            edges[node] = leading
            finished.append(node)
    return Graph(finished[::-1], edges, leaves)


def _edges_of(node: Node) -> list[Edge]:
    """Return the edges to a node's inputs. Empty inputs are left out: they have no layout."""
    return [
        Edge(node, i, used, number)
        for i, (used, number) in enumerate(node.next_functions)
        if used is not None and math.prod(shape_of(used, number))
    ]


# If two layouts of a tensor have more blocks than this, a comparison would take too long, and the
# tensor is treated as shared by all samples.
_MOST_BLOCKS = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The assignment of a tensor's entries to samples.

    The entry at row-major position i belongs to sample owners[(i // stride) mod len(owners)].
    """

    stride: int  # number of consecutive entries that belong to one sample
    n_samples: int
    # Sample numbers on the CPU, shape (n,), where -1 means no sample. If this is None, the sample
    # numbers are 0, 1, ..., n_samples - 1, and the layout is *cyclic*.
    owners: Tensor | None = None

    @property
    def period(self) -> int:
        """The number of blocks of ``stride`` entries after which the sample numbers repeat."""
        return self.n_samples if self.owners is None else len(self.owners)

    @property
    def sample_numbers(self) -> Tensor:
        """The sample numbers of the first ``period`` blocks of ``stride`` entries."""
        return torch.arange(self.n_samples) if self.owners is None else self.owners

    def owners_of_blocks(self, stride: int, n_blocks: int) -> Tensor:
        """Return the sample numbers of the first ``n_blocks`` blocks of ``stride`` entries.

        The layout's stride must be a multiple of ``stride``, so that a block belongs to one sample.
        """
        each = self.sample_numbers.repeat_interleave(self.stride // stride)
        return each.repeat(-(-n_blocks // len(each)))[:n_blocks]


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in entries."""
    return list(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else []


def stride_at(shape: Sequence[int], dim: int, width: int, period: int) -> int | None:
    """Return the stride of the layout of a tensor whose samples lie along dimension ``dim``.

    Each block of ``width`` consecutive indices belongs to one sample, and the samples repeat after
    ``period`` blocks. Return None if the dimension's size is not a multiple of period x width.
    """
    if not 0 <= dim < len(shape) or shape[dim] % (period * width) or not shape[dim]:
        return None
    return width * math.prod(shape[dim + 1 :])


def locate(shape: Sequence[int], layout: Layout) -> tuple[int, int] | None:
    """Return the dimension of a tensor along which samples lie, and the width of a sample.

    The width is the number of consecutive indices of this dimension that belong to one sample.
    The result is None if the samples lie along several dimensions, and (0, 1) for one sample.
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


def combined(a: Layout | None, b: Layout | None) -> Layout | None:
    """Return the layout of a tensor that two operations use.

    Each operation implies a layout, ``a`` or ``b``. If the two assign an entry to different
    samples, the result is None, because the entry's gradient is then a sum over both samples. An
    entry that only one layout assigns to a sample belongs to this sample.
    """
    if a is None or b is None:
        return None
    if a.owners is None and b.owners is None:
        return a if a.stride == b.stride else None
    stride = math.gcd(a.stride, b.stride)
    n = math.lcm(a.stride * a.period, b.stride * b.period) // stride
    if n > _MOST_BLOCKS:
        return None
    first, second = a.owners_of_blocks(stride, n), b.owners_of_blocks(stride, n)
    if bool(((first != second) & (first >= 0) & (second >= 0)).any()):
        return None
    return Layout(stride, a.n_samples, torch.where(first >= 0, first, second))


def cyclic(layout: Layout | None) -> Layout | None:
    """Return an equal layout without ``owners``, or ``layout`` itself if no such layout exists."""
    if layout is None or layout.owners is None or bool((layout.owners < 0).any()):
        return layout
    return completed(layout)


def completed(layout: Layout) -> Layout:
    """Return a layout without ``owners``, in which every entry belongs to a sample.

    An entry that belongs to no sample in ``layout`` has gradient zero, so the result may assign the
    entry to any sample. But this may contradict the layout that another operation implies for the
    same tensor. If no such layout exists, ``layout`` itself is returned.
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


def layout_of(owners: Tensor, stride: int, n_samples: int) -> Layout:
    """Return the layout of a tensor, given the sample number of each block of ``stride`` entries.

    ``owners`` contains these numbers on the CPU, in the shape of the tensor's leading dimensions.
    The layout leaves out leading dimensions along which the numbers repeat.
    """
    while owners.ndim > 1:
        repeats = bool((owners == owners[:1]).all())
        owners = owners[0] if repeats else owners.flatten(0, 1)
    return Layout(stride, n_samples, owners.reshape(-1))


def from_entries(owners: Tensor, n_samples: int) -> Layout | None:
    """Return a tensor's layout, given each entry's sample number, which is -1 for no sample."""
    for dim, stride in enumerate(strides(owners.shape)):
        blocks = owners.reshape(*owners.shape[: dim + 1], stride)
        largest = blocks.amax(-1)
        if bool(((blocks < 0) | (blocks == largest.unsqueeze(-1))).all()):
            return layout_of(largest, stride, n_samples)
    return None


def probed_layouts(edges: list[Edge], layouts: dict[int, Layout]) -> list[Layout | None]:
    """Return the layouts of an operation's inputs, by differentiating it with test gradients.

    This is used for operations without a rule. Samples are numbered in binary. For each bit, the
    operation is differentiated twice: with random positive output gradients for the samples whose
    number has the bit, and then for all other samples. If an input entry belongs to sample b alone,
    the entry's gradient is nonzero only in trials that include b, which gives the bits of b. If the
    gradient is nonzero in both trials of a bit, several samples share the input, so that its layout
    is None. Any two samples differ in some bit, so an operation that mixes samples is always
    detected. For B samples, this takes 2 ceil(log2 B) trials instead of one trial for each sample.
    """
    user = edges[0].user
    n_samples = next(iter(layouts.values())).n_samples
    owners = {edge.index: torch.zeros(shape_of(edge.node, edge.number)).long() for edge in edges}
    depends = {index: torch.zeros_like(own, dtype=torch.bool) for index, own in owners.items()}
    shared: set[int] = set()
    for bit in range((n_samples - 1).bit_length()):
        with_bit = (torch.arange(n_samples) >> bit) % 2 == 1
        first, second = (_depending(user, layouts, mask, owners) for mask in (with_bit, ~with_bit))
        for index, own in owners.items():
            own += first[index].long() << bit
            depends[index] |= first[index] | second[index]
            if bool((first[index] & second[index]).any()):
                shared.add(index)
    return [
        None if i in shared else from_entries(torch.where(depends[i], owners[i], -1), n_samples)
        for i in (edge.index for edge in edges)
    ]


def _depending(
    user: Node, layouts: dict[int, Layout], mask: Tensor, inputs: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return masks of the input entries on which outputs of the samples in ``mask`` depend."""
    generator = torch.Generator().manual_seed(0)
    gradients: dict[int, Tensor] = {}
    for number, layout in layouts.items():
        metadata = user._input_metadata[number]
        n_entries = math.prod(metadata.shape)
        own = layout.owners_of_blocks(layout.stride, n_entries // layout.stride)
        chosen = (mask[own] & (own >= 0)).repeat_interleave(layout.stride)
        random = 1 + torch.rand(n_entries, generator=generator)
        gradient = torch.where(chosen, random, 0).view(shape_of(user, number))
        gradients[number] = gradient.to(metadata.device, metadata.dtype)
    with torch.no_grad():
        answers = differentiate(user, gradients)
    masks = {}
    for index, like in inputs.items():
        answer = answers[index]
        if answer is None:
            answer = torch.zeros_like(like)
        masks[index] = (answer.sum_to_size(like.shape) != 0).cpu()
    return masks

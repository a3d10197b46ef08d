"""Plan a backward pass that computes the gradients of all samples of a batch.

Let f_1, ..., f_B be the model outputs of the B samples. An entry of a tensor *belongs to* sample i
if, among these outputs, only f_i depends on the entry. The derivatives of sum_j f_j and of f_i with
respect to this entry are then equal. Therefore, if each entry of a tensor belongs to one sample,
one backward pass of the sum computes the gradients with respect to this tensor for all samples.
All other tensors are *shared* by the samples: parameters, functions of parameters alone, and
tensors in which an operation has mixed samples.

A *crossing* is an edge of autograd's graph from an operation whose output entries each belong to
one sample to a shared input of this operation. Let y be the output and w the input. The chain rule
at a crossing is

    d(sum_i f_i)/dw = sum_i sum_{t of sample i} (df_i/dy_t) (dy_t/dw),

where t runs over the entries of y that belong to sample i. The inner sum is the gradient of f_i
with respect to w. ``gradient_formulas`` computes these B sums separately.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trak_core.gradients.graph import Edge, Graph, Layout, Node, combined, cyclic, name_of, shape_of
from trak_core.gradients.sample_owner_rules import input_layouts

# Operations that only copy the entries of a tensor or change their order. The gradients with
# respect to the input and the output have the same entries, so the inner products of two samples'
# gradients are equal for input and output.
MOVES = {
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"),
    *("Clone", "Alias", "ToCopy"),
}
_TURNS = {"T", "Transpose", "Permute"}
_CUTS = {"Split", "SplitWithSizes", "Unbind"}


def keeps_order(node: Node) -> bool:
    """Return whether an operation in ``MOVES``, such as a view, keeps the row-major order."""
    return name_of(node) not in _TURNS or len(shape_of(node, 0)) < 2


def _transposes(node: Node) -> bool:
    is_swap = name_of(node) == "Transpose" and (node._saved_dim0 - node._saved_dim1) % 2 == 1
    return len(shape_of(node, 0)) == 2 and (is_swap or name_of(node) == "T")


@dataclass(slots=True, eq=False)
class Region:
    """A set of connected tensors that all samples share, such as a weight and its transpose.

    In a backward pass, gradients enter the region at *crossings*. A crossing is an edge from an
    operation, whose output entries each belong to one sample, to a tensor of the region.
    """

    n_crossings: int = 0  # number of crossings that lead into the region
    parameters: list[int] = field(default_factory=list)  # indices of the region's parameters
    # Whether the region has one parameter, and each crossing leads to this whole parameter,
    # possibly transposed or reshaped. Then no backward pass through the region is needed: the
    # parameter's gradients are the sum of the gradients at the crossings, transposed or reshaped.
    is_direct: bool = True
    # Whether the region has one parameter, and no two crossings lead to the same entry of this
    # parameter. The inner product of two samples' gradients is then the sum of the inner products
    # at the crossings.
    is_simple: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The edges of autograd's graph at which a backward pass reads per-sample gradients.

    These edges are called crossings. A crossing leads from an operation, whose output entries each
    belong to one sample, to an input that all samples share, such as a weight.
    """

    # For each operation with an input that all samples share: the layout of each output, by output
    # number. The layout states which entries of the output belong to which sample.
    layouts: dict[Node, dict[int, Layout]]
    # For each of these operations: the edges to its shared inputs, and the regions of the inputs.
    crossings: dict[Node, list[tuple[Edge, Region]]]
    regions: list[Region]
    # Those of these operations at which the backward pass doesn't end, because it must also reach
    # others. Hooks read the gradients of their outputs.
    inner: list[Node]
    last: list[Node]  # those of these operations at which the backward pass ends
    parameters: Sequence[Tensor]  # those for which gradients are computed
    # Whether the plan can be reused for every graph with the same ``signature``. If not, the plan
    # also depends on values that operations have saved, such as the indices of a gather.
    is_fixed: bool

    def on_graph(
        self, nodes: Mapping[Node, Any] | Sequence[Node], parameters: Sequence[Tensor]
    ) -> "Plan":
        """Return the same plan for another graph, which must have the same ``signature``.

        ``nodes`` maps each node of this plan to the corresponding node of the other graph. For a
        plan that is cached, ``nodes`` maps to integers and ``parameters`` is empty, because a
        reference to a node or a parameter would keep a graph in memory.
        """
        crossings = {
            nodes[user]: [
                (Edge(nodes[user], e.index, nodes[e.node], e.number), region) for e, region in pairs
            ]
            for user, pairs in self.crossings.items()
        }
        layouts = {nodes[node]: layouts for node, layouts in self.layouts.items()}
        inner, last = ([nodes[node] for node in group] for group in (self.inner, self.last))
        return Plan(layouts, crossings, self.regions, inner, last, parameters, self.is_fixed)

    def formed_inputs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the operation and the shape of each input whose per-sample gradients are stored.

        The gradients with respect to other inputs are passed on as factors, which are smaller.
        """
        return [
            (name_of(edge.user), shape_of(edge.node, edge.number))
            for pairs in self.crossings.values()
            for edge, region in pairs
            if not region.is_direct
        ]


def make_plan(
    graph: Graph, root: tuple[Node, int], layout: Layout, parameters: Sequence[Tensor]
) -> Plan:
    """Return the plan of a backward pass that starts at the model outputs.

    ``root`` is the node that computes the model outputs, with the number of the node's output.
    ``layout`` states which model output belongs to which sample.
    """
    layouts, is_fixed = _layouts(graph, root, layout)
    inside = [edge for node in graph.order if node not in layouts for edge in graph.edges[node]]
    crossings = [edge for node in layouts for edge in graph.edges[node] if edge.node not in layouts]
    region_of = _regions(inside, crossings, graph)
    by_node: dict[Node, list[tuple[Edge, Region]]] = defaultdict(list)
    for edge in crossings:
        by_node[edge.user].append((edge, region_of[edge.node]))
    inner, last, above = [], [], set()
    for node in reversed(graph.order):
        if node in layouts:
            is_above = any(edge.node in above for edge in graph.edges[node])
            if node in by_node:
                (inner if is_above else last).append(node)
            if is_above or node in by_node:
                above.add(node)
    regions = list(dict.fromkeys(region_of.values()))
    crossed = {node: layouts[node] for node in by_node}
    return Plan(crossed, dict(by_node), regions, inner, last, parameters, is_fixed)


def _layouts(
    graph: Graph, root: tuple[Node, int], layout: Layout
) -> tuple[dict[Node, dict[int, Layout]], bool]:
    """Return the layouts of all operations' outputs whose entries each belong to one sample.

    A layout states which entry belongs to which sample. The second result is True if the graph
    alone determines the layouts, and False if they also depend on values that operations have
    saved, such as indices.
    """
    shared, is_one_sample = set(graph.parameters), layout.n_samples == 1
    # If the batch has only one sample, all entries of all tensors belong to this sample. Parameters
    # and their views are nevertheless treated as shared, so that crossings lead to them.
    if is_one_sample:
        for node in reversed(graph.order):
            if name_of(node) in MOVES and {edge.node for edge in graph.edges[node]} <= shared:
                shared.add(node)
    layouts: dict[Node, dict[int, Layout | None]] = defaultdict(dict)
    layouts[root[0]][root[1]] = layout
    all_fixed = True
    split: dict[Node, dict[int, Layout]] = {}
    for node in graph.order:  # visits all users of a tensor before the node that computes it
        outputs = {number: cyclic(layout) for number, layout in layouts.pop(node, {}).items()}
        known = {number: layout for number, layout in outputs.items() if layout is not None}
        edges = graph.edges[node]
        answers: list[Layout | None] = [None] * len(edges)
        if len(known) == len(outputs) > 0 and node not in shared:
            split[node] = known
            if is_one_sample:
                answers = [layout] * len(edges)
            else:
                answers, is_fixed = input_layouts(edges, known)
                all_fixed &= is_fixed
        for edge, answer in zip(edges, answers, strict=True):
            of_node = layouts[edge.node]
            if edge.number in of_node:
                answer = combined(of_node[edge.number], answer)
            of_node[edge.number] = answer
    return split, all_fixed


def _regions(inside: list[Edge], crossings: list[Edge], graph: Graph) -> dict[Node, Region]:
    """Return the region of each shared node. ``inside`` contains edges between shared nodes."""
    parent: dict[Node, Node] = {}

    def head(node: Node) -> Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    for edge in inside:
        parent[head(edge.user)] = head(edge.node)
    regions: dict[Node, Region] = defaultdict(Region)
    tensors = {(edge.node, edge.number) for edge in (*inside, *crossings)}
    for edge in crossings:
        regions[head(edge.node)].n_crossings += 1
    for node, index in graph.parameters.items():
        regions[head(node)].parameters.append(index)
    region_of = {node: regions[head(node)] for node in list(parent)}
    n_edges = Counter(region_of[edge.node] for edge in (*inside, *crossings))
    n_tensors = Counter(region_of[node] for node, _ in tensors)
    for node, region in region_of.items():
        is_parameter = node in graph.parameters
        moves = is_parameter or (name_of(node) in MOVES | _CUTS and len(graph.edges[node]) == 1)
        is_reached_once = n_edges[region] == n_tensors[region]
        has_one_parameter = len(region.parameters) == 1
        region.is_simple &= moves and is_reached_once and has_one_parameter
        is_whole = name_of(node) in MOVES and (keeps_order(node) or _transposes(node))
        region.is_direct &= has_one_parameter and (is_parameter or is_whole)
    return region_of

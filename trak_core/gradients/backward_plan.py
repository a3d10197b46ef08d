"""Find where one backward pass can tell samples apart, and takes each sample's gradients.

From the outputs down, each tensor of the graph is either *split* (every entry belongs to one
sample, see ``graph.py``) or *shared*: a parameter, a function of parameters alone, or what
several samples lead to. One backward pass serves all samples as far as tensors are split. An edge
from a split output to a shared input is a *crossing*: there the gradient of each sample is formed,
or its inner products by a closed form.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trak_core.gradients.graph import Edge, Graph, Layout, Node, joined, name_of, settled, shape_of
from trak_core.gradients.sample_owner_rules import input_layouts

# Operations that only move entries. Inner products of gradients don't see them.
MOVES = {
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"),
    *("Clone", "Alias", "ToCopy"),
}
_TURNS = {"T", "Transpose", "Permute"}
_CUTS = {"Split", "SplitWithSizes", "Unbind"}


def keeps_order(node: Node) -> bool:
    """Whether an operation that only moves entries keeps their row-major order."""
    return name_of(node) not in _TURNS or len(shape_of(node, 0)) < 2


def _transposes(node: Node) -> bool:
    """Whether an operation transposes a matrix."""
    if len(shape_of(node, 0)) != 2:
        return False
    if name_of(node) == "Transpose":
        return (node._saved_dim0 - node._saved_dim1) % 2 == 1
    return name_of(node) == "T"


@dataclass(slots=True, eq=False)
class Region:
    """A connected set of shared nodes, with the parameters below them.

    Attributes:
        n_crossings: How many edges lead into it.
        parameters: Their places among the chosen ones.
        is_direct: There is one parameter, and each crossing leads to that parameter itself, perhaps
            transposed or in another shape.
        is_simple: Every crossing leads, through operations that only move entries, to entries of
            one parameter that no other crossing leads to. Their contributions don't overlap.
    """

    n_crossings: int = 0
    parameters: list[int] = field(default_factory=list)
    is_direct: bool = True
    is_simple: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """How the backward pass goes.

    Attributes:
        layouts: For each split node with crossings, the layouts of the outputs that are used.
        crossings: For each such node, its crossings, with their region.
        inner: Such nodes that are above others.
        last: Those above no others, where the backward pass can end.
        parameters: The chosen ones.
        is_fixed: Whether the graph's signature decides the plan, so that neither indices nor other
            values that operations have saved do.
    """

    layouts: dict[Node, dict[int, Layout]]
    crossings: dict[Node, list[tuple[Edge, Region]]]
    regions: list[Region]
    inner: list[Node]
    last: list[Node]
    parameters: Sequence[Tensor]
    is_fixed: bool

    def of(self, like: Mapping[Node, Any] | Sequence[Node], parameters: Sequence[Tensor]) -> "Plan":
        """Return the same plan for another graph with an equal signature.

        ``like`` maps this plan's nodes to that graph's, or to their numbers; a plan of numbers,
        without parameters, keeps no tensor alive.
        """
        crossings = {
            like[user]: [
                (Edge(like[user], e.index, like[e.node], e.number), region) for e, region in pairs
            ]
            for user, pairs in self.crossings.items()
        }
        layouts = {like[node]: layouts for node, layouts in self.layouts.items()}
        inner, last = ([like[node] for node in nodes] for nodes in (self.inner, self.last))
        return Plan(layouts, crossings, self.regions, inner, last, parameters, self.is_fixed)

    def arrivals(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names of operations and shapes of tensors where gradients arrive as rows."""
        return [
            (name_of(edge.user), shape_of(edge.node, edge.number))
            for pairs in self.crossings.values()
            for edge, region in pairs
            if not region.is_direct
        ]


def make_plan(
    graph: Graph, root: tuple[Node, int], layout: Layout, parameters: Sequence[Tensor]
) -> Plan:
    """Return the plan from the layout of the output that the backward pass starts from."""
    layouts_of = _layouts if layout.n_samples > 1 else _of_one_sample
    layouts, is_fixed = layouts_of(graph, root, layout)
    below = [edge for node in graph.order if node not in layouts for edge in graph.edges[node]]
    crossings = [edge for node in layouts for edge in graph.edges[node] if edge.node not in layouts]
    region_of = _regions(below, crossings, graph)
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
    regions = list({id(region): region for region in region_of.values()}.values())
    crossed = {node: layouts[node] for node in by_node}
    return Plan(crossed, dict(by_node), regions, inner, last, parameters, is_fixed)


def _of_one_sample(
    graph: Graph, root: tuple[Node, int], layout: Layout
) -> tuple[dict[Node, dict[int, Layout]], bool]:
    """Give everything to the only sample, except parameters and what only moves their entries."""
    used: dict[Node, dict[int, Layout]] = defaultdict(dict, {root[0]: {root[1]: layout}})
    moved = set(graph.parameters)
    for node in reversed(graph.order):
        edges = graph.edges[node]
        if name_of(node) in MOVES and {edge.node for edge in edges} <= moved:
            moved.add(node)
        for edge in edges:
            used[edge.node][edge.number] = layout
    return {node: used[node] for node in graph.order if node not in moved}, True


def _layouts(
    graph: Graph, root: tuple[Node, int], layout: Layout
) -> tuple[dict[Node, dict[int, Layout]], bool]:
    """Visit nodes in topological order, users first, so that every user has set its layout."""
    layouts: dict[Node, dict[int, Layout | None]] = defaultdict(dict)
    layouts[root[0]][root[1]] = layout
    all_fixed = True
    split: dict[Node, dict[int, Layout]] = {}
    for node in graph.order:
        outputs = {number: settled(layout) for number, layout in layouts.pop(node, {}).items()}
        known = {number: layout for number, layout in outputs.items() if layout is not None}
        edges = graph.edges[node]
        answers: list[Layout | None] = [None] * len(edges)
        if len(known) == len(outputs) > 0 and node not in graph.parameters:
            split[node] = known
            answers, is_fixed = input_layouts(edges, known)
            all_fixed &= is_fixed
        for edge, answer in zip(edges, answers, strict=True):
            before = layouts[edge.node]
            # Users that disagree mix samples: no entry below belongs to one sample alone.
            known_before = edge.number in before
            before[edge.number] = joined(before[edge.number], answer) if known_before else answer
    return split, all_fixed


def _regions(below: list[Edge], crossings: list[Edge], graph: Graph) -> dict[Node, Region]:
    """Join connected shared nodes (union-find)."""
    parent: dict[Node, Node] = {}

    def head(node: Node) -> Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    for edge in below:
        parent[head(edge.user)] = head(edge.node)
    regions: dict[Node, Region] = defaultdict(Region)
    arrivals = {(edge.node, edge.number) for edge in (*below, *crossings)}
    for edge in crossings:
        regions[head(edge.node)].n_crossings += 1
    for node, place in graph.parameters.items():
        regions[head(node)].parameters.append(place)
    region_of = {node: regions[head(node)] for node in list(parent)}
    n_edges = Counter(id(region_of[edge.node]) for edge in (*below, *crossings))
    n_arrivals = Counter(id(region_of[node]) for node, _ in arrivals)
    for node, region in region_of.items():
        is_parameter = node in graph.parameters
        moves = is_parameter or (name_of(node) in MOVES | _CUTS and len(graph.edges[node]) == 1)
        once = n_edges[id(region)] == n_arrivals[id(region)]
        alone = len(region.parameters) == 1
        region.is_simple &= moves and once and alone
        keeps = name_of(node) in MOVES and (keeps_order(node) or _transposes(node))
        region.is_direct &= alone and (is_parameter or keeps)
    return region_of

"""Find where one backward pass can tell samples apart, and takes each sample's gradients.

From the outputs down, each tensor of the graph is either *split* (every entry belongs to one
sample, see ``graph.py``) or *shared*: a parameter, a function of parameters alone, or what
several samples lead to. One backward pass serves all samples as far as tensors are split. An edge
from a split output to a shared input is a *crossing*: there the gradient of each sample is formed,
or its inner products by a closed form.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

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
        crossings: The edges that lead into it.
        is_direct: There is one parameter, and each crossing leads to that parameter itself, perhaps
            transposed or in another shape.
        is_simple: Every crossing leads, through operations that only move entries, to entries of
            one parameter that no other crossing leads to. Their contributions don't overlap.
    """

    crossings: list[Edge] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    is_direct: bool = True
    is_simple: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """How the backward pass goes.

    Attributes:
        layouts: For each split node, the layouts of the outputs that are used.
        crossings: For each split node, its crossings, with their region.
        inner: Split nodes with crossings above other such nodes.
        last: Split nodes with crossings above no others, where the backward pass can end.
    """

    layouts: dict[Node, dict[int, Layout]]
    crossings: dict[Node, list[tuple[Edge, Region]]]
    regions: list[Region]
    inner: list[Node]
    last: list[Node]

    def arrivals(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names of operations and shapes of tensors where gradients arrive as rows."""
        return [
            (name_of(edge.user), shape_of(edge.node, edge.number))
            for region in self.regions
            if not region.is_direct
            for edge in region.crossings
        ]


def make_plan(graph: Graph, roots: dict[tuple[Node, int], Layout]) -> Plan:
    """Return the plan from the layouts of the outputs that the backward pass starts from."""
    (n_samples,) = {layout.n_samples for layout in roots.values()}
    layouts = _layouts(graph, roots) if n_samples > 1 else _of_one_sample(graph, roots)
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
    return Plan(layouts, dict(by_node), regions, inner, last)


def _of_one_sample(
    graph: Graph, roots: dict[tuple[Node, int], Layout]
) -> dict[Node, dict[int, Layout]]:
    """Give everything to the only sample, except parameters and what only moves their entries."""
    (layout, *_) = roots.values()
    used: dict[Node, dict[int, Layout]] = defaultdict(dict)
    for node, number in roots:
        used[node][number] = layout
    moved = set(graph.parameters)
    for node in reversed(graph.order):
        edges = graph.edges[node]
        if name_of(node) in MOVES and {edge.node for edge in edges} <= moved:
            moved.add(node)
        for edge in edges:
            used[edge.node][edge.number] = layout
    return {node: used[node] for node in graph.order if node not in moved}


def _layouts(graph: Graph, roots: dict[tuple[Node, int], Layout]) -> dict[Node, dict[int, Layout]]:
    """Visit nodes in topological order, users first, so that every user has set its layout."""
    layouts: dict[Node, dict[int, Layout | None]] = defaultdict(dict)
    for (node, number), layout in roots.items():
        layouts[node][number] = layout
    split: dict[Node, dict[int, Layout]] = {}
    for node in graph.order:
        outputs = {number: settled(layout) for number, layout in layouts.pop(node, {}).items()}
        known = {number: layout for number, layout in outputs.items() if layout is not None}
        edges = graph.edges[node]
        answers: list[Layout | None] = [None] * len(edges)
        if len(known) == len(outputs) > 0 and node not in graph.parameters:
            split[node] = known
            answers = input_layouts(edges, known)
        for edge, answer in zip(edges, answers, strict=True):
            before = layouts[edge.node]
            # Users that disagree mix samples: no entry below belongs to one sample alone.
            known_before = edge.number in before
            before[edge.number] = joined(before[edge.number], answer) if known_before else answer
    return split


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
        regions[head(edge.node)].crossings.append(edge)
    for node, parameter in graph.parameters.items():
        regions[head(node)].parameters.append(parameter)
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

"""Compute the gradients of an output for all samples of a batch by one backward pass.

``by_samples`` runs one ordinary backward pass of sum_i f_i, where f_i is the output of sample i.
Hooks on nodes of autograd's graph read the gradients with respect to the outputs of operations that
use parameters (``backward_plan.py`` finds these operations). From these gradients and from the
operations' inputs, each parameter's per-sample gradients are computed and passed to a consumer.
``by_rows`` is for outputs whose samples can't be told apart. It computes all rows of the Jacobian
together, by a vmapped vector-Jacobian product.

Unlike with ``torch.func.vmap(torch.func.grad(f))``, the model runs as it is written, with its own
kernels, hooks and control flow, because nothing is traced. The (B, p) matrix of gradients is not
formed: a consumer receives the gradients of one parameter at a time. For a linear layer, it
receives factors of the gradient: output gradients and inputs (see ``gradient_formulas``).
"""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trak_core.gradients.backward_plan import MOVES, Plan, Region, keeps_order, make_plan
from trak_core.gradients.gradient_formulas import closed_forms, has_formula
from trak_core.gradients.gradient_terms import Consumer, Contribution, Dense, transposed
from trak_core.gradients.graph import (
    Edge,
    Layout,
    Node,
    UnreadableGraphError,
    differentiate,
    leaf_of,
    name_of,
    shape_of,
    signature,
    stride_at,
    trace,
)

# A function that gets the gradients of several tensors. A gradient has shape (rows, *shape), or is
# None if the output doesn't depend on the tensor.
Watcher = Callable[[list[Tensor | None]], None]
_Tensors = Sequence[Tensor]
# A function that gets a parameter and the parameter's gradients, shape (rows, *shape).
_Taker = Callable[[Tensor, Tensor], None]


def take_rows(
    consumer: Consumer,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    extra: dict[Tensor, Tensor],
) -> None:
    """Propagate several rows of output gradients to parameters, and pass results to the consumer.

    ``gradients`` contains a tensor of shape (rows, *shape) for each output. ``extra`` maps
    parameters to gradients, shape (rows, entries), that are added to the results. One vmapped
    backward pass computes all rows. A parameter's gradients are freed after the consumer has used
    them. If an operation doesn't support vmap, there is one backward pass for each row, and the
    consumer gets the gradients of all parameters at the end.
    """

    def run(propagate: Callable[..., None]) -> Consumer:
        part, missing = consumer.empty(), dict(extra)

        def take(parameter: Tensor, rows: Tensor) -> None:
            part.take(parameter, [Dense(rows.reshape(1, len(rows), *parameter.shape))])

        def take_sum(parameter: Tensor, rows: Tensor) -> None:
            more = missing.pop(parameter, None)
            take(parameter, rows if more is None else rows.reshape(len(rows), -1) + more)

        if outputs:
            propagate(take_sum, outputs, gradients, parameters)
        for parameter, rows in missing.items():
            take(parameter, rows)
        return part

    try:
        part = run(_together)
    except RuntimeError:
        # Probably an operation doesn't support vmap. After any other error, this call fails, too.
        part = run(_row_by_row)
    consumer.add(part)


def _together(
    take: _Taker, outputs: Sequence[GradientEdge], gradients: _Tensors, parameters: _Tensors
) -> None:
    def watch(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def arrive(rows: list[Tensor | None]) -> None:
            assert rows[0] is not None
            take(parameter, rows[0])

        def hook(gradient: Tensor) -> Tensor:
            watch_rows([gradient], arrive, len(gradients[0]))
            # Autograd keeps the returned tensor in memory until the pass ends. A zero that is
            # expanded to the parameter's shape needs almost no memory.
            return gradient.new_zeros(()).expand(parameter.shape)

        return hook

    with hooked(outputs, [(p.register_hook, watch(p)) for p in parameters]):
        backward(outputs, gradients, parameters, lambda rows: None, keep_graph=True)


def _row_by_row(
    take: _Taker, outputs: Sequence[GradientEdge], gradients: _Tensors, parameters: _Tensors
) -> None:
    by_row = [
        torch.autograd.grad(outputs, parameters, row, retain_graph=True, allow_unused=True)
        for row in zip(*gradients, strict=True)
    ]
    for parameter, column in zip(parameters, zip(*by_row, strict=True), strict=True):
        if any(gradient is not None for gradient in column):
            zero = torch.zeros_like(parameter)
            take(parameter, torch.stack([zero if g is None else g.to_dense() for g in column]))


def backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    stops: Sequence[Tensor] | Sequence[GradientEdge],
    at_stops: Watcher,
    keep_graph: bool,
) -> None:
    """Run one backward pass for all rows, and call ``at_stops`` with the gradients of ``stops``.

    ``gradients`` contains a tensor of shape (rows, *shape) for each output. If it is None, the
    outputs are scalars, and there is one row of ones. Only operations between the outputs and
    ``stops`` run. A ``RuntimeError`` is raised if one of these operations doesn't support vmap.
    """

    def run(*rows: Tensor) -> Tensor:
        arrived = torch.autograd.grad(
            outputs, stops, rows or None, retain_graph=keep_graph, allow_unused=True
        )
        watch_rows(arrived, at_stops, 1 if gradients is None else len(gradients[0]))
        return torch.zeros(())

    if gradients is None:
        run()
        return
    if len(gradients[0]) == 1:
        run(*(gradient[0] for gradient in gradients))
        return
    with warnings.catch_warnings():
        # torch warns about operations without a batching rule. They run once for each row, which is
        # slow but correct.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        torch.func.vmap(run)(*gradients)


def watch_rows(gradients: Sequence[Tensor | None], watcher: Watcher, n_rows: int) -> None:
    """Call the watcher with gradients of shape (n_rows, *shape), even inside of ``vmap``.

    In a vmapped backward pass, ``gradients`` have the shapes of one row, but represent all rows.
    """
    if n_rows == 1:
        watcher([None if gradient is None else gradient.unsqueeze(0) for gradient in gradients])
    elif any(gradient is not None for gradient in gradients):
        _SeenThroughVmap.apply(watcher, *gradients)


class _SeenThroughVmap(torch.autograd.Function):
    """A function whose batching rule for ``vmap`` passes all rows of gradients to a callback."""

    @staticmethod
    def forward(watcher: Watcher, *gradients: Tensor | None) -> Tensor:
        watch_rows(gradients, watcher, 1)
        return torch.zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing, because no second derivatives are computed."""

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], watcher: Watcher, *gradients: Tensor | None
    ) -> tuple[Tensor, None]:
        def rows(x: Tensor, dim: int | None) -> Tensor:
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        pairs = zip(gradients, in_dims[1:], strict=True)
        watcher([None if x is None else rows(x, dim) for x, dim in pairs])
        return torch.zeros(()), None


@contextmanager
def hooked(
    start: Iterable[GradientEdge], hooks: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]
) -> Generator[None, None, None]:
    """Register hooks for one backward pass, which begins at ``start``, and remove them at the end.

    ``hooks`` are pairs (register, hook), where ``register`` is a function that registers the hook.
    An operation may run another backward pass inside of this one, for example to solve an adjoint
    ODE. The hooks ignore the inner pass.
    """
    passes: list[int] = []

    def in_first(hook: Callable[..., Any]) -> Callable[[Any], Any]:
        def fire(gradients: Any) -> Any:
            passes.append(torch._C._current_graph_task_id())
            return hook(gradients) if passes[-1] == passes[0] else None

        return fire

    with ExitStack() as stack:
        for edge in start:
            stack.callback(edge.node.register_prehook(in_first(lambda _: None)).remove)
        for register, hook in hooks:
            stack.callback(register(in_first(hook)).remove)
        yield


class GraphNeededError(Exception):
    """An operation must be differentiated again, but its saved tensors were freed."""


def by_rows(consumer: Consumer, output: Tensor, parameters: Sequence[Tensor]) -> None:
    """Pass the gradients of all entries of ``output``, in row-major order, to the consumer."""
    edge = get_gradient_edge(output)
    reached = [parameters[i] for i in trace(edge.node, parameters).parameters.values()]
    if reached and output.numel():
        rows = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
        take_rows(consumer, [edge], [rows.view(-1, *output.shape)], reached, {})


# The cache of ``plan_of``: plans of recent graphs, by key. These plans contain node numbers in
# place of nodes, so that they keep no graph in memory.
_PLANS: dict[Hashable, Plan] = {}
_MOST_PLANS = 16
_UNREADABLE = "has a graph that doesn't show which gradient belongs to which sample"


def plan_of(output: Tensor, parameters: Sequence[Tensor], dim: int) -> Plan:
    """Return the plan of a backward pass for samples along dimension ``dim`` of ``output``.

    To save time, the plans of recent graphs are kept, and reused for graphs with an equal
    ``signature``.

    Raises:
        MixedSamplesError: If an operation computes statistics over samples.
        UnreadableGraphError: If there is no sample, if samples can't be told apart, if ``output``
            depends on no parameter, if there is a single sample with several entries, or if
            parameters or modules have backward hooks, which would get sums over samples.
    """
    n_samples = output.shape[dim]
    stride = stride_at(output.shape, dim, 1, max(1, n_samples))
    if stride is None or n_samples == 1 < output.numel():
        raise UnreadableGraphError(_UNREADABLE)
    edge = get_gradient_edge(output)
    nodes, signed = signature(edge.node, parameters)
    key = signed, edge.output_nr, stride, n_samples
    plan = _PLANS.get(key)
    if plan is None:
        graph = trace(edge.node, parameters)
        of_modules = any(node.name() == "BackwardHookFunctionBackward" for node in graph.order)
        if of_modules or any(parameters[i]._backward_hooks for i in graph.parameters.values()):
            raise UnreadableGraphError(
                "has backward hooks on parameters or modules, which may change gradients"
            )
        layout = Layout(stride, n_samples)
        plan = make_plan(graph, (edge.node, edge.output_nr), layout, parameters)
        if not plan.crossings:
            raise UnreadableGraphError(_UNREADABLE)
        if not plan.is_fixed:
            return plan
        plan = _PLANS[key] = plan.on_graph({node: i for i, node in enumerate(nodes)}, ())
        if len(_PLANS) > _MOST_PLANS:
            del _PLANS[next(iter(_PLANS))]
    return plan.on_graph(nodes, parameters)


def by_samples(
    consumer: Consumer, output: Tensor, parameters: Sequence[Tensor], dim: int, *, keep_graph: bool
) -> None:
    """Compute per-sample gradients by one backward pass, and pass them to the consumer.

    Let f_{c,i} be the entries of ``output``, where the sample i is the index along ``dim``, and c
    is the index along all other dimensions. For each c, the gradient of sum_i f_{c,i} is
    propagated. The consumer gets one gradient for each entry, ordered by c, then i. The errors of
    ``plan_of`` are raised before the consumer gets any gradient.

    Without ``keep_graph``, the tensors that operations have saved are freed during the pass, unless
    an operation has no formula for its gradients. Such an operation is differentiated again after
    the pass, and needs its saved tensors. If a formula exists but doesn't apply, a
    ``GraphNeededError`` is raised, after the consumer has processed some of the gradients.
    """
    plan = plan_of(output, parameters, dim)
    others = [size for i, size in enumerate(output.shape) if i != dim]
    n_samples = output.shape[dim]
    n_each = output.numel() // n_samples
    if n_each == 1:
        # The pass starts from a scalar, the sum of the outputs, because it then needs no initial
        # gradient. To check an initial gradient's shape, torch would import sympy, which is slow.
        with torch.enable_grad():
            start, gradients = get_gradient_edge(output.sum()), None
    else:
        # In row c, the initial gradient is 1 for entry c of every sample, and 0 for all others.
        rows = torch.eye(n_each, dtype=output.dtype, device=output.device).view(n_each, *others)
        rows = rows.unsqueeze(dim + 1).expand(n_each, *output.shape)
        start, gradients = get_gradient_edge(output), [rows]
    keep_graph |= any(not has_formula(e) for pairs in plan.crossings.values() for e, _ in pairs)
    gathered = _Pass(plan, consumer, keep_graph)

    def watch(node: Node) -> Callable[[Any], None]:
        def visit(rows: list[Tensor | None]) -> None:
            gathered.visit(node, {i: row for i, row in enumerate(rows) if row is not None})

        return lambda outputs: watch_rows(outputs, visit, n_each)

    stops = [(node, number) for node in plan.last for number in plan.layouts[node]]

    def at_stops(arrived: list[Tensor | None]) -> None:
        by_node: dict[Node, dict[int, Tensor]] = defaultdict(dict)
        for (node, number), rows in zip(stops, arrived, strict=True):
            if rows is not None:
                by_node[node][number] = rows
        for node, rows in by_node.items():
            gathered.visit(node, rows)

    hooks = [(node.register_prehook, watch(node)) for node in plan.inner]
    with hooked([start], hooks):
        backward([start], gradients, [GradientEdge(*stop) for stop in stops], at_stops, keep_graph)
    gathered.finish()


class _Pass:
    """The state of a backward pass: the per-sample gradients that were computed so far.

    They are computed at the crossings of ``plan``: edges from an operation to a tensor that all
    samples share. Connected shared tensors, such as a weight and its transpose, form a region.
    """

    def __init__(self, plan: Plan, consumer: Consumer, keeps_graph: bool):
        self.plan, self.consumer = plan, consumer
        self.keeps_graph = keeps_graph  # whether saved tensors are still there after the pass
        # For each region with ``is_direct``: the gradients whose sum is the parameter's gradient.
        # When all of them are computed, they are passed to the consumer and removed.
        self.uses: dict[Region, list[Contribution]] = defaultdict(list)
        # Operations that will be differentiated after the pass, because they have no formula, with
        # the gradients of their outputs, and with the edges to inputs that samples share.
        self.waiting: dict[Node, tuple[dict[int, Tensor], list[tuple[Edge, Region]]]] = {}
        # For each other region: the sum of the gradients with respect to each of its tensors that
        # is an input of an operation outside of the region.
        self.sums: dict[Region, dict[tuple[Node, int], Tensor]] = defaultdict(dict)

    def visit(self, node: Node, gradients: dict[int, Tensor]) -> None:
        """Compute per-sample gradients with respect to the inputs of a node that samples share.

        ``gradients`` maps the number of each output of the node to the gradients with respect to
        this output, shape (C, *shape).
        """
        layouts, waiting, crossings = self.plan.layouts[node], [], self.plan.crossings[node]
        forms = closed_forms([edge for edge, _ in crossings], gradients, layouts)
        for (edge, region), contribution in zip(crossings, forms, strict=True):
            if isinstance(contribution, Dense) and not self.consumer.reads_terms:
                contribution = Dense(contribution.gradients)  # frees memory of ``terms``
            if contribution is None:
                waiting.append((edge, region))
            else:
                self._take(contribution, edge, region)
        if waiting:
            if not self.keeps_graph:
                raise GraphNeededError
            self.waiting[node] = gradients, waiting

    def _take(self, contribution: Contribution, edge: Edge, region: Region) -> None:
        if region.is_direct:
            self.uses[region].append(_to_parameter(contribution, edge))
            if len(self.uses[region]) == region.n_crossings:
                self.consumer.take(self._parameters(region)[0], self.uses.pop(region))
            return
        if region.is_simple and not self.consumer.in_order:
            self.consumer.take(self._parameters(region)[0], [contribution])
            return
        rows, node, number = _past_moves(contribution.whole(), edge)
        sums = self.sums[region]
        sums[node, number] = sums[node, number] + rows if (node, number) in sums else rows

    def finish(self) -> None:
        """Differentiate operations without a formula, then propagate gradients to parameters.

        This method must be called after the backward pass. During the pass, operations compute only
        the gradients that the pass itself needs, and the hooks of the pass would be called again.
        """
        for node, (gradients, waiting) in self.waiting.items():
            indices = [edge.index for edge, _ in waiting]
            by_input = _by_operation(node, gradients, self.plan.layouts[node], indices)
            for edge, region in waiting:
                self._take(Dense(by_input[edge.index]), edge, region)
        for region in self.plan.regions:
            if region in self.uses:  # some crossings have no gradient
                self.consumer.take(self._parameters(region)[0], self.uses.pop(region))
            sums = self.sums.pop(region, None)
            if not sums:
                continue
            edges, gradients, extra = [], [], {}
            for (node, number), rows in sums.items():
                leaf = leaf_of(node)
                if leaf is not None:
                    extra[leaf] = rows.reshape(len(rows), -1)
                else:
                    edges.append(GradientEdge(node, number))
                    gradients.append(rows.view(-1, *shape_of(node, number)))
            take_rows(self.consumer, edges, gradients, self._parameters(region), extra)

    def _parameters(self, region: Region) -> list[Tensor]:
        return [self.plan.parameters[i] for i in region.parameters]


def _to_parameter(contribution: Contribution, edge: Edge) -> Contribution:
    """Return a parameter's gradients, given those of its reshaped or transposed view."""
    node = edge.node
    while leaf_of(node) is None:
        if not keeps_order(node):
            contribution = transposed(contribution, shape_of(node, 0))
        ((node, _),) = node.next_functions
    return contribution


def _past_moves(rows: Tensor, edge: Edge) -> tuple[Tensor, Node, int]:
    """Return gradients with respect to a tensor, given those of a view, such as a reshaped weight.

    Also return the tensor's node and output number. If the view contains a ``Transpose`` or
    ``Permute``, the tensor is the result of this operation, which ``take_rows`` differentiates.
    """
    node, number = edge.node, edge.number
    rows = rows.view(-1, *shape_of(node, number))
    while name_of(node) in MOVES - {"Transpose", "Permute"}:
        if name_of(node) == "T":
            rows = rows.transpose(-1, -2) if rows.ndim == 3 else rows
        ((node, number),) = node.next_functions
        rows = rows.reshape(-1, *shape_of(node, number))
    return rows, node, number


def _by_operation(
    node: Node, gradients: dict[int, Tensor], layouts: dict[int, Layout], indices: list[int]
) -> dict[int, Tensor]:
    """Return gradients with respect to inputs of an operation without a formula.

    The operation is differentiated once for each sample. ``indices`` are the numbers of the inputs.
    The gradients have shape (C, B, *shape).
    """
    n_samples = next(iter(layouts.values())).n_samples
    like = next(iter(gradients.values()))
    n_each = len(like)
    rows_of: dict[int, list[Tensor]] = {index: [] for index in indices}
    for i, sample in itertools.product(range(n_each), range(n_samples)):
        masked = {n: _masked(rows[i], layouts[n], sample) for n, rows in gradients.items()}
        answers = differentiate(node, masked)
        for index, rows in rows_of.items():
            answer, shape = answers[index], shape_of(*node.next_functions[index])
            # Like autograd, the sum is over the dimensions along which the input was broadcast.
            rows.append(like.new_zeros(shape) if answer is None else answer.sum_to_size(shape))
    return {i: torch.stack(rows).unflatten(0, (n_each, n_samples)) for i, rows in rows_of.items()}


def _masked(gradient: Tensor, layout: Layout, sample: int) -> Tensor:
    """Return the gradient of one sample: zeros replace the entries of all other samples."""
    if layout.n_samples == 1:
        return gradient
    is_own = layout.sample_numbers.to(gradient.device) == sample
    blocks = gradient.reshape(-1, layout.period, layout.stride)
    return torch.where(is_own[:, None], blocks, 0).view(gradient.shape)

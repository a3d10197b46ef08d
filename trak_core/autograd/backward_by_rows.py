"""Run one backward pass for several rows of gradients, whatever operations lie in between."""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from trak_core.autograd.contributions import Consumer, Dense

# Takes gradients with the rows in front, (rows, *shape), None where there are none.
Watcher = Callable[[list[Tensor | None]], None]
_Tensors = Sequence[Tensor]
_Taker = Callable[[Tensor, Tensor], None]
_Way = Callable[[_Taker, Sequence[GradientEdge], _Tensors, _Tensors], None]


def take_rows(
    consumer: Consumer,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    extra: dict[Tensor, Tensor],
) -> None:
    """Hand over the rows' gradients with respect to parameters.

    One pass serves all rows; a parameter's rows are handed over and dropped when they arrive.
    Where an operation cannot take several rows at once, each row has a pass, and all are formed.
    Gradients of each output have shape (rows, *shape). ``extra`` holds rows, shape (rows, entries),
    to add to those of a parameter.
    """

    def run(way: _Way) -> Consumer:
        part, missing = consumer.empty(), dict(extra)

        def take(parameter: Tensor, rows: Tensor) -> None:
            part.take(parameter, [Dense(rows.reshape(1, len(rows), *parameter.shape))])

        def take_sum(parameter: Tensor, rows: Tensor) -> None:
            more = missing.pop(parameter, None)
            take(parameter, rows if more is None else rows.reshape(len(rows), -1) + more)

        if outputs:
            way(take_sum, outputs, gradients, parameters)
        for parameter, rows in missing.items():
            take(parameter, rows)
        return part

    try:
        part = run(_together)
    except RuntimeError:
        # An error of the operation itself comes again, now without vmap around it.
        part = run(_one_by_one)
    consumer.add(part)


def _together(
    take: _Taker, outputs: Sequence[GradientEdge], gradients: _Tensors, parameters: _Tensors
) -> None:
    def watch(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def arrive(rows: list[Tensor | None]) -> None:
            assert rows[0] is not None
            take(parameter, rows[0])

        def hook(gradient: Tensor) -> Tensor:
            show([gradient], arrive)
            # Autograd keeps what a hook returns until the pass is over: next to nothing.
            return gradient.new_zeros(()).expand(parameter.shape)

        return hook

    with hooked(parameter.register_hook(watch(parameter)) for parameter in parameters):
        backward(outputs, gradients, parameters, lambda rows: None, keep_graph=True)


def _one_by_one(
    take: _Taker, outputs: Sequence[GradientEdge], gradients: _Tensors, parameters: _Tensors
) -> None:
    by_row = [
        torch.autograd.grad(outputs, parameters, row, retain_graph=True, allow_unused=True)
        for row in zip(*gradients, strict=True)
    ]
    for parameter, column in zip(parameters, zip(*by_row, strict=True), strict=True):
        if any(gradient is not None for gradient in column):
            zero = torch.zeros_like(parameter)
            take(parameter, torch.stack([zero if g is None else g for g in column]))


def backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    stops: Sequence[GradientEdge] | Sequence[Tensor],
    at_stops: Watcher,
    keep_graph: bool,
) -> None:
    """Run one backward pass for all rows, from outputs to stops; ``at_stops`` takes what arrives.

    Gradients of each output have shape (rows, *shape); None stands for one row of ones at scalars.
    No operation runs that doesn't lead to a stop. One that cannot take several rows at once raises
    a ``RuntimeError``.
    """

    def run(*rows: Tensor) -> Tensor:
        arrived = torch.autograd.grad(
            outputs, stops, rows or None, retain_graph=keep_graph, allow_unused=True
        )
        show(arrived, at_stops)
        return torch.zeros(())

    if gradients is None:
        run()
        return
    if len(gradients[0]) == 1:
        run(*(gradient[0] for gradient in gradients))
        return
    with warnings.catch_warnings():
        # Operations without a batching rule run once a row, as they would anyway.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        torch.func.vmap(run)(*gradients)


def show(gradients: Sequence[Tensor | None], watcher: Watcher) -> None:
    """Call the watcher with the rows of each gradient, inside ``backward`` or not."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return

    def watch(tensors: list[Tensor]) -> None:
        remaining = iter(tensors)
        watcher([None if gradient is None else next(remaining) for gradient in gradients])

    _Shown.apply(watch, *present)


class _Shown(torch.autograd.Function):
    """Shows a watcher what vmap hides: the tensors of all rows."""

    @staticmethod
    def forward(watch: Callable[[list[Tensor]], None], *tensors: Tensor) -> Tensor:
        watch([tensor.unsqueeze(0) for tensor in tensors])
        return tensors[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is differentiated twice."""

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], watch: Callable[..., None], *tensors: Tensor
    ) -> tuple[Tensor, None]:
        watch([
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ])
        return tensors[0].new_zeros(()), None


@contextmanager
def hooked(handles: Iterable[Any]) -> Generator[None, None, None]:
    """Remove hooks at the end, whatever happens."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield

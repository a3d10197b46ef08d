"""Backward passes for several rows of gradients at once, watched while they run."""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

# Takes gradients with the rows in front, (rows, *shape), None where there are none.
Watcher = Callable[[list[Tensor | None]], None]


class _Seen(torch.autograd.Function):
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


def show(gradients: Sequence[Tensor | None], watcher: Watcher) -> None:
    """Call the watcher with the rows of each gradient, inside ``backward`` or not."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return

    def watch(tensors: list[Tensor]) -> None:
        remaining = iter(tensors)
        watcher([None if gradient is None else next(remaining) for gradient in gradients])

    _Seen.apply(watch, *present)


@contextmanager
def hooked(handles: Iterable[Any]) -> Generator[None, None, None]:
    """Remove hooks at the end, whatever happens."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def backward(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    stops: Sequence[GradientEdge] | Sequence[Tensor],
    at_stops: Watcher,
    keep_graph: bool,
) -> None:
    """Run one backward pass for all rows.

    Args:
        outputs: Where it starts.
        gradients: Of each of them, shape (rows, *shape); None for one row of ones at scalars.
        stops: Where it ends; nothing runs that doesn't lead to one of them.
        at_stops: Takes the gradients there, once.
        keep_graph: Whether it is needed again.

    Raises:
        RuntimeError: Besides what an operation raises: if one of them doesn't work for several rows
            at once.
    """

    def run(*rows: Tensor) -> Tensor:
        found = torch.autograd.grad(
            outputs, stops, rows or None, retain_graph=keep_graph, allow_unused=True
        )
        show(found, at_stops)
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

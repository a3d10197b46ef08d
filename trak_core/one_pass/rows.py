"""The general path: rows of gradients with respect to parameters, whatever lies between."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from trak_core.one_pass.backward import backward, hooked, show
from trak_core.one_pass.consumer import Consumer
from trak_core.one_pass.contributions import Dense


def take_rows(
    consumer: Consumer,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    extra: dict[Tensor, Tensor],
) -> None:
    """Hand over the rows' gradients with respect to parameters.

    All rows go down together; a parameter's rows are handed over and dropped when they arrive.
    Where an operation cannot take several rows at once, they go one by one, and all are formed.

    Args:
        consumer: Takes them.
        outputs: Where the rows start.
        gradients: Of each of them, shape (rows, *shape).
        parameters: What to differentiate with respect to.
        extra: Rows, shape (rows, entries), to add to those of a parameter.
    """
    found = consumer.empty()
    if outputs:
        try:
            _together(found, outputs, gradients, parameters, extra)
        except RuntimeError:
            # An error of the operation itself comes again, now without vmap around it.
            found = consumer.empty()
            _one_by_one(found, outputs, gradients, parameters, extra)
    else:
        for parameter, rows in extra.items():
            _take(found, parameter, rows)
    consumer.add(found)


def _take(consumer: Consumer, parameter: Tensor, rows: Tensor) -> None:
    consumer.take(parameter, [Dense(rows.reshape(1, len(rows), *parameter.shape))])


def _together(
    consumer: Consumer,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    extra: dict[Tensor, Tensor],
) -> None:
    arrived = set()

    def fold(parameter: Tensor, rows: Tensor | None) -> None:
        assert rows is not None
        arrived.add(parameter)
        rows = rows.reshape(len(rows), -1)
        _take(consumer, parameter, rows + extra[parameter] if parameter in extra else rows)

    def watch(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            show([gradient], lambda found: fold(parameter, found[0]))
            # Autograd keeps what a hook returns until the pass is over: next to nothing.
            return gradient.new_zeros(()).expand(parameter.shape)

        return hook

    with hooked(parameter.register_hook(watch(parameter)) for parameter in parameters):
        backward(outputs, gradients, parameters, lambda found: None, keep_graph=True)
    for parameter in extra.keys() - arrived:
        _take(consumer, parameter, extra[parameter])


def _one_by_one(
    consumer: Consumer,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    extra: dict[Tensor, Tensor],
) -> None:
    found = [
        torch.autograd.grad(
            outputs,
            parameters,
            [gradient[row] for gradient in gradients],
            retain_graph=True,
            allow_unused=True,
        )
        for row in range(len(gradients[0]))
    ]
    for parameter, column in zip(parameters, zip(*found, strict=True), strict=True):
        if any(gradient is not None for gradient in column) or parameter in extra:
            zero = torch.zeros_like(parameter)
            rows = torch.stack([zero if g is None else g for g in column])
            rows = rows.reshape(len(rows), -1)
            _take(consumer, parameter, rows + extra[parameter] if parameter in extra else rows)

"""The general path: rows of gradients with respect to parameters, whatever lies between."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from trak_core.one_pass.backward import backward, hooked, show
from trak_core.one_pass.contributions import add_product


def add_rows(
    gramian: Tensor,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    extra: dict[Tensor, Tensor],
) -> None:
    """Add J J^T to a Gramian, J the rows' gradients with respect to the parameters.

    All rows go down together; a parameter's rows are folded and dropped when they arrive. Where an
    operation cannot take several rows at once, they go one by one, and J is formed.

    Args:
        gramian: Shape (rows, rows), changed in place.
        outputs: Where the rows start.
        gradients: Of each of them, shape (rows, *shape).
        parameters: What to differentiate with respect to.
        extra: Rows, shape (rows, entries), to add to those of a parameter.
    """
    found = torch.zeros_like(gramian)
    if outputs:
        try:
            _together(found, outputs, gradients, parameters, extra)
        except RuntimeError:
            # An error of the operation itself comes again, now without vmap around it.
            found.zero_()
            _one_by_one(found, outputs, gradients, parameters, extra)
    else:
        for rows in extra.values():
            add_product(found, rows)
    gramian += found


def _together(
    gramian: Tensor,
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
        add_product(gramian, rows + extra[parameter] if parameter in extra else rows)

    def watch(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            show([gradient], lambda found: fold(parameter, found[0]))
            # Autograd keeps what a hook returns until the pass is over: next to nothing.
            return gradient.new_zeros(()).expand(parameter.shape)

        return hook

    with hooked(parameter.register_hook(watch(parameter)) for parameter in parameters):
        backward(outputs, gradients, parameters, lambda found: None)
    for parameter in extra.keys() - arrived:
        add_product(gramian, extra[parameter])


def _one_by_one(
    gramian: Tensor,
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
        for row in range(len(gramian))
    ]
    for parameter, column in zip(parameters, zip(*found, strict=True), strict=True):
        if any(gradient is not None for gradient in column) or parameter in extra:
            zero = torch.zeros_like(parameter)
            rows = torch.stack([zero if g is None else g for g in column])
            rows = rows.reshape(len(rows), -1)
            add_product(gramian, rows + extra[parameter] if parameter in extra else rows)

"""The Gramian of the gradients with respect to given parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.one_pass.contributions import PIECE, Contribution, add_product, summed_parts
from trak_core.one_pass.differentiate import by_rows, by_samples, plan_of


@dataclass(frozen=True, slots=True)
class _Products:
    """Adds up inner products, parameter by parameter.

    Attributes:
        gramian: Shape (rows, rows).
    """

    gramian: Tensor
    in_order: ClassVar[bool] = False

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """Add the products of the gradients with respect to a parameter."""
        if len(uses) == 1:
            uses[0].add_to(self.gramian)
            return
        for _, rows in summed_parts(uses, PIECE):
            add_product(self.gramian, rows)

    def empty(self) -> Self:
        """Return zeros."""
        return type(self)(torch.zeros_like(self.gramian))

    def add(self, other: Self) -> None:
        """Add another Gramian."""
        self.gramian.add_(other.gramian)


def parameter_gramian(
    output: Tensor, parameters: Sequence[Tensor], batch_dim: int | None
) -> Tensor:
    """Return J J^T, J the Jacobian of an output with respect to parameters.

    Args:
        output: Real numbers with a graph, of any shape [m1, ..., mk]; the graph stays.
        parameters: Leaves of graphs; one that is given twice counts once.
        batch_dim: The dimension of the output along which samples are independent, or None.

    Returns:
        Shape [m1, ..., mk, mk, ..., m1], the output's dtype, on its device.

    Raises:
        InputError: If the output has no graph, or no dimension ``batch_dim``.
        MixedSamplesError: If an operation takes statistics over independent samples.
        RuntimeError: If an operation of the graph cannot be differentiated.
    """
    if not (isinstance(output, Tensor) and output.requires_grad):
        found = "no gradient" if isinstance(output, Tensor) else type(output).__name__
        raise InputError(
            "The output must be a tensor with a graph, that is with requires_grad. "
            f"Found {found}. Call the modules outside of torch.no_grad(), and don't detach.",
            code="gramian.no_graph",
        )
    n = output.numel()
    order = list(range(output.ndim))
    gramian = output.detach().new_zeros(n, n)
    products = _Products(gramian)
    with torch.no_grad():
        dim = None if batch_dim is None else _checked_dim(output, batch_dim)
        plan = None if dim is None else plan_of(output, parameters, dim)
        if dim is None or plan is None:
            by_rows(products, output, parameters)
        else:
            by_samples(products, output, plan, dim, keep_graph=True)
            order.append(order.pop(dim))
    shape = [output.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(output.ndim)]
    ahead = [output.ndim + dim for dim in reversed(back)]
    return gramian.view(shape + shape).permute(back + ahead)


def _checked_dim(output: Tensor, batch_dim: int) -> int:
    if not -output.ndim <= batch_dim < output.ndim:
        raise InputError(
            f"The output must have the dimension batch_dim = {batch_dim}. Found an output of shape "
            f"{tuple(output.shape)}. Give one output or loss a sample, with "
            'reduction="none" for instance, or leave batch_dim out.',
            code="gramian.batch_dim",
        )
    return batch_dim % output.ndim

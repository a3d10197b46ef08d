"""Who takes the gradients of a backward pass: something that adds up over parameters."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

from torch import Tensor

from trak_core.one_pass.contributions import Contribution


class Consumer(Protocol):
    """Takes the gradients of one parameter after the other, in no order, and adds something up.

    Attributes:
        in_order: Whether it counts which entry of a parameter is which.
    """

    in_order: ClassVar[bool]

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """Take the gradients with respect to a parameter: the sum of its uses.

        A parameter comes at most once; for who doesn't count entries, perhaps in several parts.
        """
        ...

    def empty(self) -> Self:
        """Return another one that has taken nothing yet."""
        ...

    def add(self, other: Self) -> None:
        """Add what another one has added up."""
        ...

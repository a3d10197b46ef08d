"""What one use of a parameter contributes to gradients, in forms smaller than the gradients.

Rows are pairs (c, b): c counts what is differentiated within a sample, b the samples. A
contribution stands for the matrix of those rows' gradients with respect to one tensor. It can add
that matrix times its transpose to a Gramian, or return it, flattened in the tensor's own order, as
a whole or in parts. A consumer takes the contributions of one parameter after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

# Entries that a piece of formed gradients may have: 16 MiB of float32.
PIECE = 2**22


class Contribution(Protocol):
    """One use of a tensor, which is read as a matrix: its first dimension, and all the others."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Size of the tensor as a matrix."""
        ...

    @property
    def n_rows(self) -> int:
        """How many gradients there are."""
        ...

    def add_to(self, gramian: Tensor) -> None:
        """Add to a Gramian of shape (rows, rows), in place."""
        ...

    def part(self, first: int, last: int) -> Tensor:
        """Return the gradients of the matrix's rows from ``first`` to ``last``.

        Returns:
            Shape (rows, (last - first) x the matrix's columns).
        """
        ...


def rows_of(contribution: Contribution) -> Tensor:
    """Return whole gradients, shape (rows, entries)."""
    return contribution.part(0, contribution.matrix[0])


def whole(contribution: Contribution) -> "Dense":
    """Return the same with its gradients formed, as those of a matrix of one row."""
    return Dense(rows_of(contribution)[None, :, None])


def summed_parts(uses: Sequence[Contribution], most_entries: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the sum of several uses of one tensor, a part after the other.

    Args:
        uses: At least one, in the tensor's own order.
        most_entries: Of a part, unless a single row of the matrix has more.

    Yields:
        The first entry, and gradients of shape (rows, entries).
    """
    if len({use.matrix for use in uses}) > 1:  # seen in several shapes
        uses = [whole(use) for use in uses]
    n, width = uses[0].matrix
    step = max(1, most_entries // max(1, width * uses[0].n_rows))
    for first in range(0, n, step):
        total, *others = (use.part(first, min(first + step, n)) for use in uses)
        for other in others:
            total = total + other
        yield first * width, total


def add_product(gramian: Tensor, rows: Tensor) -> None:
    """Add rows times their transpose."""
    rows = rows.to(gramian.dtype)
    gramian.addmm_(rows, rows.T)


def pieces(size: int, entries_each: int) -> Iterator[slice]:
    """Cut ``size`` things of ``entries_each`` entries so that each piece stays small."""
    step = max(1, PIECE // max(1, entries_each))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


@dataclass(frozen=True, slots=True)
class Dense:
    """Gradients that are small enough to be formed, shape (C, B, *shape of the tensor)."""

    gradients: Tensor

    @property
    def matrix(self) -> tuple[int, int]:
        """See ``Contribution``."""
        first = self.gradients.shape[2] if self.gradients.ndim > 2 else 1
        return first, self.gradients[0, 0].numel() // max(1, first)

    @property
    def n_rows(self) -> int:
        """See ``Contribution``."""
        return self.gradients.shape[0] * self.gradients.shape[1]

    def add_to(self, gramian: Tensor) -> None:
        """See ``Contribution``."""
        add_product(gramian, rows_of(self))

    def part(self, first: int, last: int) -> Tensor:
        """See ``Contribution``."""
        width = self.matrix[1]
        return self.gradients.reshape(self.n_rows, -1)[:, first * width : last * width]


@dataclass(frozen=True, slots=True)
class Outer:
    """Sums of outer products: the gradient of row (c, b) is sum_t left[b, t] right[c, b, t]^T.

    Their inner products are sum_tt' <left, left'> <right, right'>, without any gradient; which way
    is cheaper depends on the sizes.

    Attributes:
        left: Shape (B, T, p).
        right: Shape (C, B, T, q).
        is_turned: Whether the tensor is of shape (q, p) instead of (p, q).
    """

    left: Tensor
    right: Tensor
    is_turned: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """See ``Contribution``."""
        p, q = self.left.shape[-1], self.right.shape[-1]
        return (q, p) if self.is_turned else (p, q)

    @property
    def n_rows(self) -> int:
        """See ``Contribution``."""
        return self.right.shape[0] * self.right.shape[1]

    def add_to(self, gramian: Tensor) -> None:
        """See ``Contribution``."""
        c, b, t, q = self.right.shape
        p = self.left.shape[-1]
        if prefers_inner_products(c * b, t, p, q):
            self._add_inner_products(gramian)
            return
        turned = self.right.transpose(-1, -2)
        for part in pieces(p, c * b * q):
            add_product(gramian, (turned @ self.left[..., part]).reshape(c * b, -1))

    def _add_inner_products(self, gramian: Tensor) -> None:
        c, b, t, _ = self.right.shape
        left, right = self.left.flatten(0, 1), self.right.flatten(0, 2)
        for i in range(c):
            for part in pieces(b, t * c * b * t):
                n = part.stop - part.start
                products = self.right[i, part].flatten(0, 1) @ right.T
                of_left = self.left[part].flatten(0, 1) @ left.T
                products = products.view(n, t, c, b, t)
                products *= of_left.view(n, t, 1, b, t)
                sums = products.sum((1, 4)).view(n, c * b)
                gramian[i * b + part.start : i * b + part.stop] += sums.to(gramian.dtype)

    def part(self, first: int, last: int) -> Tensor:
        """See ``Contribution``."""
        a, b = (self.right, self.left) if self.is_turned else (self.left, self.right)
        a = a[..., first:last].transpose(-1, -2)
        # A product of matrices with nothing to add up is slower.
        found = a * b if a.shape[-1] == 1 else a @ b
        return found.reshape(self.n_rows, -1)


def prefers_inner_products(n_rows: int, n_places: int, p: int, q: int) -> bool:
    """Whether inner products of (rows x places) cost less than gradients of p x q entries."""
    by_products = (n_rows * n_places) ** 2 * (p + q + 8)
    by_gradients = n_rows * (n_places + n_rows) * p * q + 8 * n_rows * p * q
    return by_products < by_gradients


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table that were looked up.

    Attributes:
        indices: Which, shape (B, T).
        gradients: Of what was found, shape (C, B, T, q).
        n_entries: Rows of the table.
    """

    indices: Tensor
    gradients: Tensor
    n_entries: int

    @property
    def matrix(self) -> tuple[int, int]:
        """See ``Contribution``."""
        return self.n_entries, self.gradients.shape[-1]

    @property
    def n_rows(self) -> int:
        """See ``Contribution``."""
        return self.gradients.shape[0] * self.gradients.shape[1]

    def add_to(self, gramian: Tensor) -> None:
        """See ``Contribution``."""
        used, places = self.indices.unique(return_inverse=True)
        for part in pieces(self.gradients.shape[-1], gramian.shape[0] * len(used)):
            add_product(gramian, _summed(places, len(used), self.gradients[..., part]))

    def part(self, first: int, last: int) -> Tensor:
        """See ``Contribution``."""
        n = last - first
        inside = (self.indices >= first) & (self.indices < last)
        # What lies outside goes to a row of its own.
        places = torch.where(inside, self.indices - first, n)
        q = self.gradients.shape[-1]
        return _summed(places, n + 1, self.gradients)[:, : n * q]


def _summed(places: Tensor, n_places: int, found: Tensor) -> Tensor:
    """Add up what was found at each of ``n_places`` places, shape (C B, n_places q)."""
    c, b, _, q = found.shape
    own = torch.arange(c * b, device=places.device).view(c, b, 1)
    sums = found.new_zeros(c * b * n_places, q)
    sums.index_add_(0, (own * n_places + places).flatten(), found.flatten(0, 2))
    return sums.view(c * b, n_places * q)


def turned(contribution: Contribution, shape: tuple[int, ...]) -> Contribution:
    """Return the same with respect to the transpose of a matrix of this shape."""
    if isinstance(contribution, Outer) and contribution.matrix == shape:
        return replace(contribution, is_turned=not contribution.is_turned)
    return Dense(rows_of(contribution).unflatten(1, shape).transpose(1, 2).unsqueeze(0))


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

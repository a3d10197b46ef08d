"""Keep what one use of a parameter adds to its gradients as factors, smaller than the gradients.

Rows are pairs (c, b): c counts what is differentiated within a sample, b the samples. A
contribution stands for the matrix of those rows' gradients with respect to one tensor. It can add
that matrix times its transpose to a Gramian, or return it, flattened in the tensor's own order, as
a whole or in parts. A consumer takes the contributions of one parameter after the other.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

# Entries that a piece of formed gradients may have: 16 MiB of float32, which stay in a CPU's cache.
PIECE = 2**22
# And 128 MiB of a GPU's memory, because each piece costs a host 2 ms there to start its kernels.
PIECE_OF_GPU = 2**25


def piece_on(device: torch.device) -> int:
    """Return how many entries a piece of formed gradients may have on a device."""
    return PIECE_OF_GPU if device.type == "cuda" else PIECE


@dataclass(frozen=True, slots=True)
class Contribution(ABC):
    """One use of a tensor, which is read as a matrix: its first dimension by all the others.

    Attributes:
        gradients: Gradients where the tensor is used, shape (C, B, ...).
        has_ranks: Whether places are ranks among those that a sample has here, such as the tokens
            that are routed to an expert: which tokens they are isn't known.
    """

    gradients: Tensor
    has_ranks: bool = field(default=False, kw_only=True)

    @property
    def n_rows(self) -> int:
        """Number of rows, C x B."""
        return self.gradients.shape[0] * self.gradients.shape[1]

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int]:
        """Size of the tensor as a matrix."""

    @abstractmethod
    def add_to(self, gramian: Tensor) -> None:
        """Add the inner products of rows to a Gramian of shape (rows, rows), in place."""

    @abstractmethod
    def part(self, first: int, last: int) -> Tensor:
        """Return the gradients of some of the matrix's rows, shape (rows, entries of those)."""

    def whole(self) -> Tensor:
        """Return whole gradients, shape (rows, entries)."""
        return self.part(0, self.matrix[0])

    def flattened(self) -> "Dense":
        """Return the contribution to the same tensor, read as a matrix of one row."""
        return Dense(self.whole()[None, :, None])


def summed_parts(uses: Sequence[Contribution]) -> Iterator[tuple[int, Tensor]]:
    """Yield the sum of several uses of one tensor, at least one, a part after the other.

    A part has at most ``piece_on`` entries, unless a single row of the matrix has more.

    Yields:
        The first entry, and gradients of shape (rows, entries), in the tensor's own order.
    """
    if len(uses) > 1 and len({use.matrix for use in uses}) > 1:  # seen in several shapes
        uses = [use.flattened() for use in uses]
    n, width = uses[0].matrix
    step = max(1, piece_on(uses[0].gradients.device) // max(1, width * uses[0].n_rows))
    for first in range(0, n, step):
        total = uses[0].part(first, min(first + step, n))
        for use in uses[1:]:
            total = total + use.part(first, min(first + step, n))
        yield first * width, total


def add_product(gramian: Tensor, rows: Tensor) -> None:
    """Add rows times their transpose."""
    rows = rows.to(gramian.dtype)
    gramian.addmm_(rows, rows.T)


def pieces(size: int, entries_each: int) -> Iterator[slice]:
    """Cut ``size`` items of ``entries_each`` entries into slices of at most ``PIECE`` entries."""
    step = max(1, PIECE // max(1, entries_each))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


@dataclass(frozen=True, slots=True)
class Dense(Contribution):
    """Gradients that are small enough to be formed, shape (C, B, *shape of the tensor).

    Attributes:
        terms: Makes those whose sum over places T they are, shape (C, B, T, *shape); None if there
            are none.
    """

    terms: Callable[[], Tensor] | None = None

    @property
    def matrix(self) -> tuple[int, int]:
        _, _, *shape = self.gradients.shape
        return (shape[0], math.prod(shape[1:])) if shape else (1, 1)

    def add_to(self, gramian: Tensor) -> None:
        add_product(gramian, self.whole())

    def part(self, first: int, last: int) -> Tensor:
        n, width = self.matrix
        rows = self.gradients.reshape(self.n_rows, n * width)
        return rows if last - first == n else rows[:, first * width : last * width]


@dataclass(frozen=True, slots=True)
class Outer(Contribution):
    """Sums of outer products: row (c, b) is sum_t inputs[b, t] gradients[c, b, t]^T.

    Their inner products are sum_tt' <inputs, inputs'> <gradients, gradients'>, without any gradient
    of the tensor. Which way is cheaper depends on the sizes.

    Attributes:
        gradients: Shape (C, B, T, q).
        inputs: Shape (B, T, p).
        is_transposed: Whether the tensor is of shape (q, p) instead of (p, q).
    """

    inputs: Tensor
    is_transposed: bool

    @property
    def matrix(self) -> tuple[int, int]:
        p, q = self.inputs.shape[-1], self.gradients.shape[-1]
        return (q, p) if self.is_transposed else (p, q)

    def add_to(self, gramian: Tensor) -> None:
        c, b, t, q = self.gradients.shape
        p = self.inputs.shape[-1]
        if prefers_inner_products(c * b, t, p, q):
            self._add_inner_products(gramian)
            return
        transposed_gradients = self.gradients.transpose(-1, -2)
        for part in pieces(p, c * b * q):
            rows = transposed_gradients @ self.inputs[..., part]
            add_product(gramian, rows.reshape(c * b, -1))

    def _add_inner_products(self, gramian: Tensor) -> None:
        c, b, t, _ = self.gradients.shape
        inputs, gradients = self.inputs.flatten(0, 1), self.gradients.flatten(0, 2)
        for i in range(c):
            for part in pieces(b, t * c * b * t):
                n = part.stop - part.start
                products = self.gradients[i, part].flatten(0, 1) @ gradients.T
                input_products = self.inputs[part].flatten(0, 1) @ inputs.T
                products = products.view(n, t, c, b, t)
                products *= input_products.view(n, t, 1, b, t)
                sums = products.sum((1, 4)).view(n, c * b)
                gramian[i * b + part.start : i * b + part.stop] += sums.to(gramian.dtype)

    def part(self, first: int, last: int) -> Tensor:
        alone = self.gradients.shape[0] == 1  # without a first dimension, torch does less
        gradients = self.gradients[0] if alone else self.gradients
        left, right = (gradients, self.inputs) if self.is_transposed else (self.inputs, gradients)
        left = left.mT[..., first:last, :]
        # Broadcasting is faster than a matrix product with nothing to sum.
        product = torch.mul if left.shape[-1] == 1 else torch.bmm if alone else torch.matmul
        return product(left, right).reshape(self.n_rows, -1)


def prefers_inner_products(n_rows: int, n_places: int, p: int, q: int) -> bool:
    """Whether inner products of (rows x places) cost less than gradients of p x q entries."""
    by_products = (n_rows * n_places) ** 2 * (p + q + 8)
    by_gradients = n_rows * (n_places + n_rows) * p * q + 8 * n_rows * p * q
    return by_products < by_gradients


@dataclass(frozen=True, slots=True)
class Lookup(Contribution):
    """Looked up rows of a table of ``n_entries``: gradients (C, B, T, q), places (B, T)."""

    indices: Tensor
    n_entries: int

    @property
    def matrix(self) -> tuple[int, int]:
        return self.n_entries, self.gradients.shape[-1]

    def add_to(self, gramian: Tensor) -> None:
        used, places = self.indices.unique(return_inverse=True)
        for part in pieces(self.gradients.shape[-1], gramian.shape[0] * len(used)):
            add_product(gramian, _summed(places, len(used), self.gradients[..., part]))

    def part(self, first: int, last: int) -> Tensor:
        n = last - first
        inside = (self.indices >= first) & (self.indices < last)
        # What lies outside goes to a row of its own.
        places = torch.where(inside, self.indices - first, n)
        q = self.gradients.shape[-1]
        return _summed(places, n + 1, self.gradients)[:, : n * q]


def _summed(places: Tensor, n_places: int, gradients: Tensor) -> Tensor:
    """Sum gradients (C, B, T, q) over equal places, into shape (C B, n_places q)."""
    c, b, _, q = gradients.shape
    own = torch.arange(c * b, device=places.device).view(c, b, 1)
    sums = gradients.new_zeros(c * b * n_places, q)
    sums.index_add_(0, (own * n_places + places).flatten(), gradients.flatten(0, 2))
    return sums.view(c * b, n_places * q)


def transposed(contribution: Contribution, shape: tuple[int, ...]) -> Contribution:
    """Return the contribution to the transpose of a matrix of this shape."""
    if isinstance(contribution, Outer) and contribution.matrix == shape:
        return replace(contribution, is_transposed=not contribution.is_transposed)
    return Dense(contribution.whole().unflatten(1, shape).transpose(1, 2).unsqueeze(0))


class Consumer(Protocol):
    """Takes the gradients of one parameter after the other, in no order, and sums them up.

    Attributes:
        in_order: Whether it matters which entry of a parameter is which.
        reads_terms: Whether it reads what formed gradients are sums of, which takes memory.
    """

    in_order: ClassVar[bool]
    reads_terms: ClassVar[bool]

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """Take the gradients with respect to a parameter, the sum of its uses.

        A parameter comes at most once, or in several parts if ``in_order`` is False.
        """
        ...

    def empty(self) -> Self:
        """Return a consumer of the same kind that has taken nothing yet."""
        ...

    def add(self, other: Self) -> None:
        """Add the sums of another consumer."""
        ...

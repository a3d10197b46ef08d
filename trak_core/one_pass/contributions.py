"""What one use of a parameter adds to a Gramian, in the forms that are cheaper than its gradients.

Rows are pairs (c, b): c counts what is differentiated within a sample, b the samples. A
contribution stands for the matrix of those rows' gradients with respect to one tensor. It can add
that matrix times its transpose to a Gramian, piece by piece, or return the matrix, flattened in the
tensor's own order, where several uses have to be summed first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Entries that a piece may have: 16 MiB of float32.
PIECE = 2**22


class Contribution(Protocol):
    """One use of a parameter."""

    def add_to(self, gramian: Tensor) -> None:
        """Add to a Gramian of shape (rows, rows), in place."""
        ...

    def rows(self) -> Tensor:
        """Return the gradients, shape (rows, entries)."""
        ...


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

    def add_to(self, gramian: Tensor) -> None:
        """See ``Contribution``."""
        add_product(gramian, self.rows())

    def rows(self) -> Tensor:
        """See ``Contribution``."""
        c, b = self.gradients.shape[:2]
        return self.gradients.reshape(c * b, -1)


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

    def rows(self) -> Tensor:
        """See ``Contribution``."""
        a, b = (self.right, self.left) if self.is_turned else (self.left, self.right)
        return (a.transpose(-1, -2) @ b).flatten(0, 1).flatten(1)


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

    def add_to(self, gramian: Tensor) -> None:
        """See ``Contribution``."""
        used, places = self.indices.unique(return_inverse=True)
        for part in pieces(self.gradients.shape[-1], gramian.shape[0] * len(used)):
            add_product(gramian, self._summed(places, len(used), part))

    def rows(self) -> Tensor:
        """See ``Contribution``."""
        return self._summed(self.indices, self.n_entries, slice(None))

    def _summed(self, places: Tensor, n_places: int, part: slice) -> Tensor:
        found = self.gradients[..., part]
        c, b, _, q = found.shape
        own = torch.arange(c * b, device=places.device).view(c, b, 1)
        sums = found.new_zeros(c * b * n_places, q)
        sums.index_add_(0, (own * n_places + places).flatten(), found.flatten(0, 2))
        return sums.view(c * b, n_places * q)

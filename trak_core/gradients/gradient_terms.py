"""Represent per-sample gradients by factors, which are smaller than the gradients.

A batch has B samples with C outputs each (C = 1 for the gradients of a model output f). A
``Contribution`` represents the gradients of all outputs with respect to one use of a tensor. These
gradients are a matrix G of shape (C B, entries), with a row for each output c of each sample b,
ordered by c, then b. If a parameter is used several times, its gradients are the sum of several
contributions.

For a linear layer y_t = W x_t and delta_t = df_i/dy_t, sample i's gradient is

    dW_i = sum_{t of sample i} delta_t x_t^T,

which ``Outer`` stores as the pair (delta, x). For T tokens and a weight with p x q entries, the
pair has T (p + q) numbers instead of p q. Opacus and BackPACK compute dW_i for all i by an einsum,
whose result has B p q numbers. In this package, at most ``max_piece_entries`` numbers are computed
at a time. From the factors, Opacus also computes the norms |dW_i| ("ghost norms"). This package
computes all inner products <dW_i, dW_j>, the Gramian, in this way.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

# Largest number of gradient entries that are computed at a time on a CPU. They take 16 MiB in
# float32, so that they fit into the CPU's cache.
PIECE = 2**22
# On a GPU, this number is 2**25 (128 MiB), or as many entries as fit into 1/128 of the GPU's memory
# if that is more. It is larger than on a CPU, because starting a piece's kernels takes up to 2 ms.
_LEAST_OF_GPU, _SHARE_OF_GPU = 2**25, 128


def max_piece_entries(device: torch.device) -> int:
    """Return the largest number of gradient entries that are computed at a time on a device."""
    if device.type != "cuda":
        return PIECE
    n_bytes = torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_GPU
    return max(_LEAST_OF_GPU, n_bytes // 4)


@dataclass(frozen=True, slots=True)
class Contribution(ABC):
    """The gradients of C outputs of B samples with respect to one use of a tensor.

    The tensor is treated as a matrix: all dimensions except the first are flattened into one. G,
    shape (C B, entries), contains all gradients, with a row for each output of each sample.
    """

    gradients: Tensor  # with respect to the operation's output, shape (C, B, ...)
    # Whether the operation gets only some tokens of a text, as in a mixture of experts. Tokens are
    # then numbered 0, 1, .... Otherwise, a token's number is its position in the text.
    has_ranks: bool = field(default=False, kw_only=True)

    @property
    def n_rows(self) -> int:
        return self.gradients.shape[0] * self.gradients.shape[1]

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int]:
        """The shape of the tensor when it is treated as a matrix."""

    def add_to(self, gramian: Tensor) -> None:
        """Add the inner products of all gradients, G G^T, to ``gramian``, shape (C B, C B)."""
        for _, rows in summed_parts([self]):
            add_product(gramian, rows)

    @abstractmethod
    def part(self, first: int, last: int) -> Tensor:
        """Return the gradients with respect to rows first, ..., last - 1, shape (C B, entries)."""

    def whole(self) -> Tensor:
        """Return the gradients with respect to the whole tensor, shape (C B, entries)."""
        return self.part(0, self.matrix[0])

    def flattened(self) -> "Dense":
        """Return the same gradients, with the tensor treated as a matrix of one row."""
        return Dense(self.whole()[None, :, None])


def summed_parts(uses: Sequence[Contribution]) -> Iterator[tuple[int, Tensor]]:
    """Sum a parameter's gradients over its ``uses``, and yield the sum in parts.

    The parameter is treated as a matrix, and each part is for some of its rows. A part has at most
    ``max_piece_entries`` numbers, or else only one row.

    Yields:
        The index of the part's first entry in the row-major parameter, and the gradients with
        respect to the part, shape (C B, entries).
    """
    if len({use.matrix for use in uses}) > 1:  # the tensor was reshaped between its uses
        uses = [use.flattened() for use in uses]
    n, width = uses[0].matrix
    for rows in pieces(n, width * uses[0].n_rows, uses[0].gradients.device):
        total = uses[0].part(rows.start, rows.stop)
        for use in uses[1:]:
            total = total + use.part(rows.start, rows.stop)
        yield rows.start * width, total


def add_product(gramian: Tensor, rows: Tensor) -> None:
    rows = rows.to(gramian.dtype)
    gramian.addmm_(rows, rows.T)


def pieces(size: int, entries_each: int, device: torch.device) -> Iterator[slice]:
    """Split items into slices of at most ``max_piece_entries`` entries, but at least one item."""
    step = max(1, max_piece_entries(device) // max(1, entries_each))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


@dataclass(frozen=True, slots=True)
class Dense(Contribution):
    """Gradients with respect to a small tensor, stored as a whole, shape (C, B, *shape)."""

    # A function that returns the terms of single tokens, shape (C, B, T, *shape), whose sum over
    # the T tokens is ``gradients``. None if these terms are not known.
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
    """Sums of outer products of inputs x and output gradients delta, as for a linear layer.

    For output c of sample b, the gradient with respect to the weight is

        G_cb = sum_t x_bt delta_cbt^T,

    where t runs over T tokens. ``gradients`` is delta, shape (C, B, T, q). Inner products are

        <G_cb, G_c'b'> = sum_{t, t'} <x_bt, x_b't'> <delta_cbt, delta_c'b't'>.

    This formula doesn't need the p x q numbers of G_cb. ``add_to`` uses the formula or computes the
    gradients, whichever costs less.
    """

    inputs: Tensor  # x, shape (B, T, p)
    is_transposed: bool  # whether the tensor has shape (q, p) instead of (p, q)

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
        for part in pieces(p, c * b * q, gramian.device):
            rows = transposed_gradients @ self.inputs[..., part]
            add_product(gramian, rows.reshape(c * b, -1))

    def _add_inner_products(self, gramian: Tensor) -> None:
        c, b, t, _ = self.gradients.shape
        inputs, gradients = self.inputs.flatten(0, 1), self.gradients.flatten(0, 2)
        for i in range(c):
            # This sums <x_bt, x_b't'> <delta_cbt, delta_c'b't'> for some samples b at a time.
            for part in pieces(b, t * c * b * t, gramian.device):
                n = part.stop - part.start
                products = self.gradients[i, part].flatten(0, 1) @ gradients.T
                input_products = self.inputs[part].flatten(0, 1) @ inputs.T
                products = products.view(n, t, c, b, t)
                products *= input_products.view(n, t, 1, b, t)
                sums = products.sum((1, 4)).view(n, c * b)
                gramian[i * b + part.start : i * b + part.stop] += sums.to(gramian.dtype)

    def part(self, first: int, last: int) -> Tensor:
        has_one_output = self.gradients.shape[0] == 1  # then a batched product is faster
        gradients = self.gradients[0] if has_one_output else self.gradients
        left, right = (gradients, self.inputs) if self.is_transposed else (self.inputs, gradients)
        left = left.mT[..., first:last, :]
        if left.shape[-1] == 1:  # one token: broadcasting is faster than a product without a sum
            product = left * right
        else:
            product = torch.bmm(left, right) if has_one_output else left @ right
        return product.reshape(self.n_rows, -1)


def prefers_inner_products(n_rows: int, n_positions: int, p: int, q: int) -> bool:
    """Return whether computing a Gramian from factors costs less than forming the gradients.

    There are ``n_rows`` gradients with p x q entries. Each is a sum over ``n_positions`` tokens or
    pixels of outer products of vectors with p and q entries. The cost is the number of
    multiplications, plus 8 for each number that is written.
    """
    by_products = (n_rows * n_positions) ** 2 * (p + q + 8)
    by_gradients = n_rows * (n_positions + n_rows) * p * q + 8 * n_rows * p * q
    return by_products < by_gradients


@dataclass(frozen=True, slots=True)
class Lookup(Contribution):
    """Gradients of an embedding table, stored as the gradients of the vectors that were looked up.

    The gradient of the table's row v is sum_{t with index v} delta_t. ``gradients`` is delta, shape
    (C, B, T, q), for T lookups of each sample. Like ``torch.nn.Embedding(sparse=True)``, this class
    needs no memory for rows without a lookup.
    """

    indices: Tensor  # shape (B, T)
    n_entries: int  # number of rows of the table

    @property
    def matrix(self) -> tuple[int, int]:
        return self.n_entries, self.gradients.shape[-1]

    def add_to(self, gramian: Tensor) -> None:
        used, numbers = self.indices.unique(return_inverse=True)
        q, each = self.gradients.shape[-1], gramian.shape[0] * len(used)
        for part in pieces(q, each, gramian.device):
            add_product(gramian, _summed(numbers, len(used), self.gradients[..., part]))

    def part(self, first: int, last: int) -> Tensor:
        n = last - first
        inside = (self.indices >= first) & (self.indices < last)
        # Gradients of table rows outside of the part are added to an extra row n, which is dropped.
        numbers = torch.where(inside, self.indices - first, n)
        q = self.gradients.shape[-1]
        return _summed(numbers, n + 1, self.gradients)[:, : n * q]


def _summed(indices: Tensor, n: int, gradients: Tensor) -> Tensor:
    """Return the sums of gradients that have the same index, shape (C B, n q).

    ``gradients`` has shape (C, B, T, q), and ``indices``, from 0 to n - 1, has shape (B, T).
    """
    c, b, _, q = gradients.shape
    row = torch.arange(c * b, device=indices.device).view(c, b, 1)
    sums = gradients.new_zeros(c * b * n, q)
    sums.index_add_(0, (row * n + indices).flatten(), gradients.flatten(0, 2))
    return sums.view(c * b, n * q)


def transposed(contribution: Contribution, shape: tuple[int, ...]) -> Contribution:
    """Return gradients with respect to W^T, given those with respect to W, which has ``shape``."""
    if isinstance(contribution, Outer) and contribution.matrix == shape:
        return replace(contribution, is_transposed=not contribution.is_transposed)
    return Dense(contribution.whole().unflatten(1, shape).transpose(1, 2).unsqueeze(0))


class Consumer(ABC):
    """Process the gradients of a batch, and add the results to the tensors ``totals``.

    ``take`` is called with the gradients of one parameter after another, in any order. ``finish``
    is called at the end.
    """

    in_order: ClassVar[bool] = True  # whether results depend on the order of a parameter's entries
    reads_terms: ClassVar[bool] = False  # whether ``Dense.terms`` is read, which needs memory
    totals: Sequence[Tensor]

    def begin(self, totals: Sequence[Tensor]) -> None:
        """Set the tensors to which results are added."""
        self.totals = totals

    @abstractmethod
    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """Process the per-sample gradients of one parameter. They are the sum over ``uses``.

        If ``in_order`` is True, this method is called at most once for each parameter. Otherwise,
        it may be called several times, for disjoint sets of the parameter's entries.
        """

    def finish(self) -> None:
        """Process gradients that ``take`` has buffered. By default, nothing is buffered."""
        return

    def for_samples(self, samples: slice) -> Self:
        """Return a consumer for the gradients of some samples, which adds to the same tensors.

        The first dimension of all ``totals`` must index the samples, unless a subclass overrides
        this method.
        """
        return self._beginning([total[samples] for total in self.totals])

    def empty(self) -> Self:
        """Return a consumer for the same samples, whose totals are new tensors of zeros."""
        return self._beginning([torch.zeros_like(total) for total in self.totals])

    def _beginning(self, totals: Sequence[Tensor]) -> Self:
        other = copy.copy(self)
        other.begin(totals)
        return other

    def add(self, other: Self) -> None:
        """Add the totals of ``other``, which ``empty`` has returned, to those of this consumer."""
        other.finish()
        for total, more in zip(self.totals, other.totals, strict=True):
            total += more

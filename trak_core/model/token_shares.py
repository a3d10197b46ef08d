"""Cut inner products of gradients with directions by tokens and parameters, as gradients come."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from trak_core.autograd.gradient_terms import (
    PIECE,
    Contribution,
    Dense,
    Lookup,
    Outer,
    summed_parts,
)
from trak_core.autograd.token_margins import BiasFactors, MarginFactors
from trak_core.projection import back_project
from trak_core.spec import ProjectionSpec, matrix_shape


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which samples of a batch meet which directions, in the order of samples.

    Attributes:
        samples: Places in the batch, shape (pairs,).
        directions: Rows of the vectors, shape (pairs,).
    """

    samples: Tensor
    directions: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """What one use of a parameter says of some tokens.

    ``of`` gives the inner products with a direction, of some samples at each place, (n, places).
    """

    first: int
    n_places: int
    of: Callable[[Tensor, Tensor], Tensor]


class Shares:
    """A consumer of gradients that adds up <x, R v> for pairs of a gradient x and a vector v.

    A parameter's direction R v is made when its gradients come, and none of a weight is formed: the
    factors of a gradient, sum_t a_t b_t^T, give the share a_t^T D b_t of the token t. Entries of
    gradients are multiplied with ``scales``, by the parameter's name, if there are some.

    Attributes:
        by_token: Shape (pairs, tokens + 1), float64; at the end what belongs to no single token,
            such as the part of a table of positions.
        by_parameter: Shape (pairs, parameters), float64. Both have the same sums.
    """

    in_order: ClassVar[bool] = True
    reads_terms: ClassVar[bool] = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        vectors: Tensor,
        pairs: Pairs,
        by_token: Tensor,
        by_parameter: Tensor,
        scales: Mapping[str, Tensor] | None = None,
    ):
        self._parameters, self._projection, self._scales = parameters, projection, scales
        self._vectors, self._pairs = vectors, pairs
        self.by_token, self.by_parameter = by_token, by_parameter
        self._places: dict[int, tuple[int, int, str]] = {}
        offset = 0
        for number, (name, parameter) in enumerate(parameters.items()):
            self._places[id(parameter)] = offset, number, name
            offset += parameter.numel()

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        vectors: Tensor,
        pairs: Pairs,
        n_tokens: int,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return zeros for texts of ``n_tokens``; 0 for samples without tokens."""
        sizes = n_tokens + 1, len(parameters)
        by_token, by_parameter = (
            torch.zeros(len(pairs.samples), size, dtype=torch.float64, device=vectors.device)
            for size in sizes
        )
        return cls(parameters, projection, vectors, pairs, by_token, by_parameter, scales)

    @property
    def _n_tokens(self) -> int:
        return self.by_token.shape[1] - 1

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        n_entries = parameter.numel()
        if not n_entries:
            return
        offset, number, name = self._places[id(parameter)]
        shape = matrix_shape(parameter.shape)
        used = self._pairs.directions.unique()
        for some in used.split(max(1, PIECE // n_entries)):
            directions = back_project(self._vectors[some], self._projection, offset, n_entries)
            if self._scales is not None and name in self._scales:
                directions = directions * self._scales[name].flatten()
            for use in uses:
                for part in self._parts(use, shape):
                    self._add(part, some, directions, number)

    def _add(self, part: _Part, some: Tensor, directions: Tensor, number: int) -> None:
        last = part.first + part.n_places
        are_tokens = part.n_places > 0 and last <= self._n_tokens
        for direction, vector in zip(some, directions, strict=True):
            (pairs,) = torch.where(self._pairs.directions == direction)
            shares = part.of(self._pairs.samples[pairs], vector).double()
            sums = shares.sum(1)
            if are_tokens:
                self.by_token[pairs, part.first : last] += shares
            else:
                self.by_token[pairs, -1] += sums
            self.by_parameter[pairs, number] += sums

    def _parts(self, use: Contribution, shape: tuple[int, int]) -> Iterator[_Part]:
        """Yield what a use says of its places; of tokens, if there are as many."""
        if isinstance(use, MarginFactors | BiasFactors) and use.matrix == shape:
            first = 0
            for outer in use.outers():
                yield _of_outer(outer, shape, first)
                first += outer.inputs.shape[1]
        elif isinstance(use, Outer) and use.matrix == shape:
            yield self._if_tokens(_of_outer(use, shape, 0), use)
        elif isinstance(use, Lookup) and use.matrix == shape:
            yield self._if_tokens(_of_lookup(use, shape), use)
        elif isinstance(use, Dense) and use.terms is not None:
            terms = use.terms()[0]
            # A parameter without dimensions has terms without any.
            terms = terms.reshape(*terms.shape[:2], shape[0] * shape[1]).float()
            part = _Part(0, terms.shape[1], lambda own, d: terms[own] @ d)
            yield self._if_tokens(part, use)
        else:
            for first, rows in summed_parts([use], PIECE):
                yield _of_rows(rows.float(), first)

    def _if_tokens(self, part: _Part, use: Contribution) -> _Part:
        are_tokens = part.n_places == self._n_tokens and not use.has_ranks
        return part if are_tokens else _Part(0, 0, part.of)

    def of(self, samples: slice) -> Self:
        ends = self._pairs.samples.new_tensor([samples.start, samples.stop])
        rows = slice(*torch.searchsorted(self._pairs.samples, ends).tolist())
        pairs = Pairs(self._pairs.samples[rows] - samples.start, self._pairs.directions[rows])
        return self._with(pairs, self.by_token[rows], self.by_parameter[rows])

    def empty(self) -> Self:
        totals = torch.zeros_like(self.by_token), torch.zeros_like(self.by_parameter)
        return self._with(self._pairs, *totals)

    def _with(self, pairs: Pairs, by_token: Tensor, by_parameter: Tensor) -> Self:
        given = self._parameters, self._projection, self._vectors, pairs
        return type(self)(*given, by_token, by_parameter, self._scales)

    def add(self, other: Self) -> None:
        self.by_token += other.by_token
        self.by_parameter += other.by_parameter

    def finish(self) -> None:
        return  # nothing is held back


def _of_outer(use: Outer, shape: tuple[int, int], first: int) -> _Part:
    gradients = use.gradients[0]

    def of(own: Tensor, direction: Tensor) -> Tensor:
        matrix = direction.view(shape)
        matrix = matrix.T if use.is_transposed else matrix
        return ((use.inputs[own].float() @ matrix) * gradients[own].float()).sum(-1)

    return _Part(first, use.inputs.shape[1], of)


def _of_lookup(use: Lookup, shape: tuple[int, int]) -> _Part:
    gradients = use.gradients[0]

    def of(own: Tensor, direction: Tensor) -> Tensor:
        return (direction.view(shape)[use.indices[own]] * gradients[own].float()).sum(-1)

    return _Part(0, use.indices.shape[1], of)


def _of_rows(rows: Tensor, first: int) -> _Part:
    part = slice(first, first + rows.shape[1])
    return _Part(0, 0, lambda own, direction: (rows[own] @ direction[part])[:, None])

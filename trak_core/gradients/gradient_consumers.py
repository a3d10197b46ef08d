"""Consumers of per-sample gradients, which store all entries or a digest."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from trak_core.gradients.gradient_terms import Consumer, Contribution, summed_parts


class SampleConsumer(Consumer, Protocol):
    """A consumer of a batch's gradients that keeps one row for each sample."""

    def of(self, samples: slice) -> Self:
        """Return a consumer for some of the samples, which writes into the same tensors."""
        ...

    def finish(self) -> None:
        """Process gradients that are still buffered, after the last ``take``."""


class _Rows:
    """A sample consumer with one tensor for each parameter.

    The tensors ``rows``, shape (batch, ...), stay zero for parameters on which f doesn't depend.
    """

    in_order: ClassVar[bool] = True
    reads_terms: ClassVar[bool] = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], rows: Mapping[str, Tensor]):
        self._parameters, self.rows = parameters, dict(rows)
        self._names = {id(p): name for name, p in parameters.items()}

    def of(self, samples: slice) -> Self:
        return type(self)(self._parameters, {name: x[samples] for name, x in self.rows.items()})

    def empty(self) -> Self:
        zeros = {name: torch.zeros_like(x) for name, x in self.rows.items()}
        return type(self)(self._parameters, zeros)

    def add(self, other: Self) -> None:
        for name, total in self.rows.items():
            total += other.rows[name]

    def finish(self) -> None:
        return  # No gradient is buffered.


class Formed(_Rows):
    """A consumer that stores whole gradients, shape (batch, *shape) each."""

    @classmethod
    def zeros(cls, parameters: Mapping[str, nn.Parameter], n_samples: int) -> Self:
        rows = {name: p.new_zeros((n_samples, *p.shape)) for name, p in parameters.items()}
        return cls(parameters, rows)

    @classmethod
    def adding_to(cls, rows: Tensor, parameters: Mapping[str, nn.Parameter]) -> Self:
        """Return a consumer that adds the gradients to ``rows``, shape (batch, p)."""
        parts = rows.split([p.numel() for p in parameters.values()], dim=1)
        return cls(parameters, dict(zip(parameters, parts, strict=True)))

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        rows = self.rows[self._names[id(parameter)]].view(uses[0].n_rows, parameter.numel())
        for first, part in summed_parts(uses):
            rows[:, first : first + part.shape[1]] += part


class Digest(_Rows):
    """A consumer that stores products G_i v, by which gradients of two methods are compared.

    G_i is sample i's gradient with respect to a parameter, as a matrix: all dimensions except the
    first are flattened. The vector v has standard normal entries. For each parameter, the products
    have shape (batch, rows of G_i) and at least the given dtype.
    """

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        n_samples: int,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        rows = {}
        for name, p in parameters.items():
            shape = n_samples, p.shape[0] if p.ndim else 1
            rows[name] = p.new_zeros(shape, dtype=torch.promote_types(p.dtype, dtype))
        return cls(parameters, rows)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        name = self._names[id(parameter)]
        total = self.rows[name]
        n = total.shape[1]
        width = parameter.numel() // max(1, n)
        generator = torch.Generator().manual_seed(list(self.rows).index(name))
        vector = torch.randn(width, generator=generator).to(total.device, total.dtype)
        uses = [use if use.matrix == (n, width) else use.flattened() for use in uses]
        for first, part in summed_parts(uses):
            rows = part.unflatten(1, (-1, width)).to(total.dtype) @ vector
            total[:, first // width : first // width + rows.shape[1]] += rows

    def difference(self, other: Self) -> tuple[float, str]:
        """Return the largest difference from another digest, and the name of its parameter.

        The difference is relative to the other digest's largest entry. It is infinity if an entry
        is finite only in the other digest, and NaN if an entry is finite in neither digest.
        """
        largest = max((float(b.abs().max()) for b in other.rows.values() if b.numel()), default=0)
        differences = [(0.0, "no parameter")]
        for name, a in self.rows.items():
            b = other.rows[name]
            if (b.isfinite() & ~a.isfinite()).any():
                return math.inf, name
            if a.numel():
                differences.append((float((a - b).abs().max()), name))
        difference, name = max(differences, key=lambda pair: (math.isnan(pair[0]), pair[0]))
        return difference / largest if largest > 0 else difference, name

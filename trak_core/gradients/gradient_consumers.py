"""Consumers of per-sample gradients that store whole gradients or products with random vectors."""

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from trak_core.gradients.gradient_terms import Consumer, Contribution, summed_parts


class _Rows(Consumer):
    """A consumer that adds its results to one tensor for each parameter."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], totals: Sequence[Tensor]):
        self._names = list(parameters)
        self._numbers = {id(parameter): i for i, parameter in enumerate(parameters.values())}
        self.begin(totals)

    @property
    def rows(self) -> dict[str, Tensor]:
        """The results for each parameter, by the parameter's name. Each has shape (batch, ...)."""
        return dict(zip(self._names, self.totals, strict=True))


class Formed(_Rows):
    """A consumer that stores the gradients of each parameter as a whole, shape (batch, *shape)."""

    @classmethod
    def zeros(cls, parameters: Mapping[str, nn.Parameter], n_samples: int) -> Self:
        return cls(parameters, [p.new_zeros((n_samples, *p.shape)) for p in parameters.values()])

    @classmethod
    def adding_to(cls, rows: Tensor, parameters: Mapping[str, nn.Parameter]) -> Self:
        """Return a consumer that adds each sample's gradient to a row of ``rows``, (batch, p)."""
        return cls(parameters, rows.split([p.numel() for p in parameters.values()], dim=1))

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        rows = self.totals[self._numbers[id(parameter)]].view(uses[0].n_rows, parameter.numel())
        for first, part in summed_parts(uses):
            rows[:, first : first + part.shape[1]] += part


class Digest(_Rows):
    """A consumer that stores products of gradients and random vectors.

    Digests serve to compare the gradients that two methods compute, without storing the gradients.
    Let the matrix G_i be sample i's gradient with respect to a parameter, whose dimensions after
    the first are flattened. The vector v has standard normal entries, which are the same in every
    digest. The products G_i v, shape (batch, rows of G_i), need far less memory than the gradients.
    If gradients differ, their products with v almost surely differ too.
    """

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        n_samples: int,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        totals = []
        for p in parameters.values():
            shape = n_samples, p.shape[0] if p.ndim else 1
            totals.append(p.new_zeros(shape, dtype=torch.promote_types(p.dtype, dtype)))
        return cls(parameters, totals)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        number = self._numbers[id(parameter)]
        total = self.totals[number]
        n = total.shape[1]
        width = parameter.numel() // max(1, n)
        generator = torch.Generator().manual_seed(number)
        vector = torch.randn(width, generator=generator).to(total.device, total.dtype)
        uses = [use if use.matrix == (n, width) else use.flattened() for use in uses]
        for first, part in summed_parts(uses):
            rows = part.unflatten(1, (-1, width)).to(total.dtype) @ vector
            total[:, first // width : first // width + rows.shape[1]] += rows

    def difference(self, other: Self) -> tuple[float, str]:
        """Return the largest difference from another digest, and the name of the parameter.

        The difference is relative to the largest entry of ``other``. It is infinity if an entry is
        finite only in ``other``, and NaN if an entry is finite in neither digest.
        """
        largest = max((float(b.abs().max()) for b in other.totals if b.numel()), default=0)
        differences = [(0.0, "no parameter")]
        for name, a, b in zip(self._names, self.totals, other.totals, strict=True):
            if (b.isfinite() & ~a.isfinite()).any():
                return math.inf, name
            if a.numel():
                differences.append((float((a - b).abs().max()), name))
        difference, name = max(differences, key=lambda pair: (math.isnan(pair[0]), pair[0]))
        return difference / largest if largest > 0 else difference, name

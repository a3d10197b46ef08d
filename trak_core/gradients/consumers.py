"""Take per-sample gradients parameter by parameter: form them, or keep a short digest."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from trak_core.autograd.contributions import PIECE, Consumer, Contribution, summed_parts


class SampleConsumer(Consumer, Protocol):
    """Takes the gradients of a batch, one row a sample."""

    def of(self, samples: slice) -> Self:
        """Return a consumer that takes the gradients of some samples, into the same tensors."""
        ...

    def finish(self) -> None:
        """Add up what was held back, because no gradient comes any more."""
        ...


class Formed:
    """Whole gradients.

    Attributes:
        gradients: Names to tensors (batch, *shape); zeros where no gradient came.
    """

    in_order: ClassVar[bool] = True

    def __init__(self, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]):
        self._parameters, self.gradients = parameters, dict(gradients)
        self._names = {id(p): name for name, p in parameters.items()}

    @classmethod
    def zeros(cls, parameters: Mapping[str, nn.Parameter], n_samples: int) -> Self:
        """Return zeros for ``n_samples`` samples."""
        rows = {name: p.new_zeros((n_samples, *p.shape)) for name, p in parameters.items()}
        return cls(parameters, rows)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        rows = self.gradients[self._names[id(parameter)]].view(uses[0].n_rows, parameter.numel())
        for first, part in summed_parts(uses, PIECE):
            rows[:, first : first + part.shape[1]] += part

    def of(self, samples: slice) -> Self:
        rows = {name: block[samples] for name, block in self.gradients.items()}
        return type(self)(self._parameters, rows)

    def finish(self) -> None:
        """Hold nothing back."""

    def empty(self) -> Self:
        zeros = {name: torch.zeros_like(block) for name, block in self.gradients.items()}
        return type(self)(self._parameters, zeros)

    def add(self, other: Self) -> None:
        for name, block in self.gradients.items():
            block += other.gradients[name]


class Digest:
    """A random combination of each gradient's entries, row by row, to compare gradients by.

    A parameter is read as a matrix of its first dimension by all others; every row of the matrix
    gives its product with one random vector.

    Attributes:
        rows: One tensor a parameter, shape (batch, rows of the matrix), float32 or float64.
    """

    in_order: ClassVar[bool] = True

    def __init__(self, parameters: Sequence[Tensor], rows: Sequence[Tensor]):
        self._parameters, self.rows = parameters, list(rows)
        self._numbers = {id(p): i for i, p in enumerate(parameters)}

    @classmethod
    def zeros(cls, parameters: Sequence[Tensor], n_samples: int) -> Self:
        """Return zeros for ``n_samples`` samples."""
        rows = [
            p.new_zeros(
                (n_samples, p.shape[0] if p.ndim else 1),
                dtype=torch.promote_types(p.dtype, torch.float32),
            )
            for p in parameters
        ]
        return cls(parameters, rows)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        i = self._numbers[id(parameter)]
        total = self.rows[i]
        n = total.shape[1]
        width = parameter.numel() // max(1, n)
        vector = torch.randn(width, generator=torch.Generator().manual_seed(i))
        vector = vector.to(total.device, total.dtype)
        uses = [use if use.matrix == (n, width) else use.flattened() for use in uses]
        for first, part in summed_parts(uses, PIECE):
            rows = part.unflatten(1, (-1, width)).to(total.dtype) @ vector
            total[:, first // width : first // width + rows.shape[1]] += rows

    def of(self, samples: slice) -> Self:
        return type(self)(self._parameters, [rows[samples] for rows in self.rows])

    def finish(self) -> None:
        """Hold nothing back."""

    def empty(self) -> Self:
        return type(self)(self._parameters, [torch.zeros_like(rows) for rows in self.rows])

    def add(self, other: Self) -> None:
        for rows, more in zip(self.rows, other.rows, strict=True):
            rows += more


class Magnitude:
    """The largest absolute entry of each gradient; not finite where an entry isn't.

    Attributes:
        rows: Names of parameters to shape (batch,).
    """

    in_order: ClassVar[bool] = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], rows: Mapping[str, Tensor]):
        self._parameters, self.rows = parameters, dict(rows)
        self._names = {id(p): name for name, p in parameters.items()}

    @classmethod
    def zeros(cls, parameters: Mapping[str, nn.Parameter], n_samples: int) -> Self:
        """Return zeros for ``n_samples`` samples."""
        return cls(parameters, {name: p.new_zeros(n_samples) for name, p in parameters.items()})

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        largest = self.rows[self._names[id(parameter)]]
        for _, part in summed_parts(uses, PIECE):
            torch.maximum(largest, part.abs().amax(dim=1), out=largest)

    def of(self, samples: slice) -> Self:
        rows = {name: largest[samples] for name, largest in self.rows.items()}
        return type(self)(self._parameters, rows)

    def finish(self) -> None:
        """Hold nothing back."""

    def empty(self) -> Self:
        zeros = {name: torch.zeros_like(largest) for name, largest in self.rows.items()}
        return type(self)(self._parameters, zeros)

    def add(self, other: Self) -> None:
        for name, largest in self.rows.items():
            torch.maximum(largest, other.rows[name], out=largest)

"""Consumers of per-sample gradients: keep them whole, their largest entry, or a digest to compare.

Where digests of two ways differ, ``Twin`` says by finite differences in float64 which is right.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from trak_core.gradients.differentiable_model import in_evaluation_mode
from trak_core.gradients.gradient_terms import Consumer, Contribution, summed_parts
from trak_core.gradients.model_inputs import Batch, rounding
from trak_core.model_outputs.model_output import ModelOutput, of_sample


class SampleConsumer(Consumer, Protocol):
    """Takes the gradients of a batch, one row a sample."""

    def of(self, samples: slice) -> Self:
        """Return a consumer that takes the gradients of some samples, into the same tensors."""
        ...

    def finish(self) -> None:
        """Add up what was held back, because no gradient comes any more."""
        ...


class _Rows(ABC):
    """A sample consumer with one tensor a parameter.

    Attributes:
        rows: Names of parameters to tensors (batch, ...); zeros where no gradient came.
    """

    reads_terms: ClassVar[bool] = False
    _combine: ClassVar[Callable[..., Tensor]] = staticmethod(torch.add)

    def __init__(self, parameters: Mapping[str, nn.Parameter], rows: Mapping[str, Tensor]):
        self._parameters, self.rows = parameters, dict(rows)
        self._names = {id(p): name for name, p in parameters.items()}

    @classmethod
    def zeros(cls, parameters: Mapping[str, nn.Parameter], n_samples: int) -> Self:
        """Return zeros for ``n_samples`` samples."""
        return cls(parameters, {name: cls._zeros(p, n_samples) for name, p in parameters.items()})

    @staticmethod
    @abstractmethod
    def _zeros(parameter: nn.Parameter, n_samples: int) -> Tensor:
        """Return the tensor of one parameter."""

    def of(self, samples: slice) -> Self:
        return type(self)(self._parameters, {name: x[samples] for name, x in self.rows.items()})

    def empty(self) -> Self:
        zeros = {name: torch.zeros_like(x) for name, x in self.rows.items()}
        return type(self)(self._parameters, zeros)

    def add(self, other: Self) -> None:
        for name, total in self.rows.items():
            self._combine(total, other.rows[name], out=total)

    def finish(self) -> None:
        return  # nothing is held back


class Formed(_Rows):
    """Whole gradients, (batch, *shape) each."""

    in_order: ClassVar[bool] = True

    @staticmethod
    def _zeros(parameter: nn.Parameter, n_samples: int) -> Tensor:
        return parameter.new_zeros((n_samples, *parameter.shape))

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        rows = self.rows[self._names[id(parameter)]].view(uses[0].n_rows, parameter.numel())
        for first, part in summed_parts(uses):
            rows[:, first : first + part.shape[1]] += part


class Digest(_Rows):
    """A random combination of each gradient's entries, row by row, to compare gradients by.

    A parameter is read as a matrix of its first dimension by all others; every row of the matrix
    gives its product with one random vector. Shape (batch, rows of the matrix), float32 or float64.
    """

    in_order: ClassVar[bool] = True

    @staticmethod
    def _zeros(parameter: nn.Parameter, n_samples: int) -> Tensor:
        shape = n_samples, parameter.shape[0] if parameter.ndim else 1
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.new_zeros(shape, dtype=dtype)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        name = self._names[id(parameter)]
        total = self.rows[name]
        n = total.shape[1]
        width = parameter.numel() // max(1, n)
        vector = self._vector(name, width)
        uses = [use if use.matrix == (n, width) else use.flattened() for use in uses]
        for first, part in summed_parts(uses):
            rows = part.unflatten(1, (-1, width)).to(total.dtype) @ vector
            total[:, first // width : first // width + rows.shape[1]] += rows

    def _vector(self, name: str, width: int) -> Tensor:
        """Return the random vector of a parameter, shape (width,)."""
        seed = list(self.rows).index(name)
        vector = torch.randn(width, generator=torch.Generator().manual_seed(seed))
        return vector.to(self.rows[name].device, self.rows[name].dtype)

    def direction(self, name: str, row: int) -> Tensor:
        """Return the parameter's change, along which f has the derivative that ``row`` holds."""
        parameter = self._parameters[name]
        n_rows = self.rows[name].shape[1]
        direction = self.rows[name].new_zeros(n_rows, parameter.numel() // n_rows)
        direction[row] = self._vector(name, direction.shape[1])
        return direction.view(parameter.shape)

    def difference(self, other: Self) -> float:
        """Return the largest difference from another digest, relative to its largest entry.

        Infinity where it is finite and this one isn't; NaN where both aren't.
        """
        pairs = [(a, other.rows[name]) for name, a in self.rows.items() if a.numel()]
        if any((b.isfinite() & ~a.isfinite()).any() for a, b in pairs):
            return math.inf
        largest = max(float(b.abs().max()) for _, b in pairs)
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        return difference / largest if largest > 0 else difference


class Magnitude(_Rows):
    """The largest absolute entry of each gradient, (batch,); not finite where an entry isn't."""

    in_order: ClassVar[bool] = False
    _combine: ClassVar[Callable[..., Tensor]] = staticmethod(torch.maximum)

    @staticmethod
    def _zeros(parameter: nn.Parameter, n_samples: int) -> Tensor:
        return parameter.new_zeros(n_samples)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        largest = self.rows[self._names[id(parameter)]]
        for _, part in summed_parts(uses):
            torch.maximum(largest, part.abs().amax(dim=1), out=largest)


# In a direction whose entries are near 1: the error is its square, and 1e-16 of f over it.
_STEP = 1e-6
# A way is right if it misses the finite difference by less than this part of the disagreement.
_NEAR = 0.1


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of a model in float64, its parameters in order, and two samples or more."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ModelOutput
    pair: Batch

    @classmethod
    def of(
        cls, model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, pair: Batch
    ) -> "Twin":
        """Copy a model, which keeps its numbers; an error says that it can't be copied."""
        copies: dict[int, nn.Parameter] = {}
        twin = copy.deepcopy(model, copies).double()
        own = {name: copies[id(parameter)] for name, parameter in parameters.items()}
        return cls(twin, own, output, pair.mapped(_in_float64))

    def allowed(self) -> float:
        """Return how far two ways may differ by rounding; see ``rounding``."""
        with in_evaluation_mode(self.model):
            return rounding(self.model, self.pair)

    def which_is_right(self, first: Digest, second: Digest) -> int | None:
        """Return 0 or 1, the way that finite differences agree with; None if they do with neither.

        The direction is that of the digests' entry that differs most, of one sample.
        """
        name, (sample, row) = _largest_difference(first, second)
        alone = self.pair.rows(slice(sample, sample + 1))
        direction = first.direction(name, row)
        # Where f itself depends on the others of its batch, there is no truth.
        truths = [
            self._derivative(batch, i, name, direction)
            for batch, i in ((self.pair, sample), (alone, 0))
        ]
        values = [float(digest.rows[name][sample, row]) for digest in (first, second)]
        near = _NEAR * abs(values[0] - values[1])
        for number, value in enumerate(values):
            if all(abs(truth - value) < near for truth in truths):
                return number
        return None

    @torch.no_grad()
    def _derivative(self, batch: Batch, i: int, name: str, direction: Tensor) -> float:
        """Return the derivative of sample i's f as a parameter moves, by central differences."""
        parameter = self.parameters[name]
        start = parameter.detach().clone()
        values = []
        for step in (_STEP, -_STEP):
            parameter.copy_(start + step * direction)
            with in_evaluation_mode(self.model):
                outputs = self.output.read(batch.given_to(self.model))
            own = of_sample(outputs, i, len(batch))
            values.append(self.output.value(own, batch.labels[i]))
        parameter.copy_(start)
        return float((values[0] - values[1]) / (2 * _STEP))


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _largest_difference(first: Digest, second: Digest) -> tuple[str, tuple[int, int]]:
    differences = {
        name: (a - second.rows[name]).abs() for name, a in first.rows.items() if a.numel()
    }
    name = max(differences, key=lambda name: float(differences[name].max()))
    place = int(differences[name].argmax())
    return name, divmod(place, differences[name].shape[1])

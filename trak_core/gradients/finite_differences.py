"""Say which of two ways to a gradient is right, by finite differences in float64."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trak_core.gradients.collect_gradients import Digest
from trak_core.gradients.model_inputs import Batch, rounding
from trak_core.gradients.per_sample import in_evaluation_mode
from trak_core.model_outputs.model_output import ModelOutput, of_sample

# In a direction whose entries are near 1: the error is its square, and 1e-16 of f over it.
_STEP = 1e-6
# A way is right if it misses the finite difference by less than this part of the disagreement.
_NEAR = 0.1


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of a model in float64, with its parameters, in the order of the model's.

    Attributes:
        pair: Two samples, or more, in float64.
    """

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

    def which_is_right(self, one: Digest, other: Digest) -> int | None:
        """Return 0 or 1, the way that finite differences agree with; None if they do with neither.

        The direction is that of the digests' entry that differs most, of one sample.
        """
        name, (sample, row) = _largest_difference(one, other)
        alone = self.pair.rows(slice(sample, sample + 1))
        direction = one.direction(name, row)
        # Where f itself depends on the others of its batch, there is no truth.
        truths = [
            self._derivative(batch, i, name, direction)
            for batch, i in ((self.pair, sample), (alone, 0))
        ]
        values = [float(digest.rows[name][sample, row]) for digest in (one, other)]
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


def _largest_difference(one: Digest, other: Digest) -> tuple[str, tuple[int, int]]:
    differences = {name: (a - other.rows[name]).abs() for name, a in one.rows.items() if a.numel()}
    name = max(differences, key=lambda name: float(differences[name].max()))
    place = int(differences[name].argmax())
    return name, divmod(place, differences[name].shape[1])

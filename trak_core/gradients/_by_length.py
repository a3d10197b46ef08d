"""How many texts fit into memory together: the longer the longest, the fewer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from trak_core.gradients._batch import Batch
from trak_core.gradients._chunks import SampleMemory, budget_bytes, check_fits, sample_memory
from trak_core.model_outputs.model_output import ModelOutput


@dataclass(frozen=True, slots=True)
class MemoryByLength:
    """What differentiating a sample takes, by the tokens of the longest it is padded to.

    Attributes:
        shortest: Tokens of the shortest text; 0 where all samples have one shape.
        longest: Tokens of the longest text, likewise.
        of_shortest: What it takes, measured.
        of_longest: What the longest takes, measured.
    """

    shortest: int
    longest: int
    of_shortest: SampleMemory
    of_longest: SampleMemory

    def at(self, length: int) -> SampleMemory:
        """Return what a text takes in a batch whose longest has so many tokens, at most.

        Activations grow with the tokens and, in attention, with their square: a straight line
        between two measurements lies above what is between them.
        """
        low, high = self.of_shortest, self.of_longest
        if self.shortest == self.longest:
            return high
        assert length <= self.longest
        part = max(0, length - self.shortest) / (self.longest - self.shortest)
        more = high.activation_bytes - low.activation_bytes
        return replace(high, activation_bytes=low.activation_bytes + int(part * more))

    def mapped(self, function: Callable[[SampleMemory], SampleMemory]) -> "MemoryByLength":
        """Return what another use of the model takes, by what differentiating does."""
        low, high = function(self.of_shortest), function(self.of_longest)
        return MemoryByLength(self.shortest, self.longest, low, high)

    def room(self, device: torch.device, memory_mb: int) -> "Room":
        """Return how many fit.

        Args:
            device: Of the model. On CUDA four fifths of its free memory count, now and for all
                batches, whatever ``memory_mb``.
            memory_mb: MiB for arrays on the CPU.

        Raises:
            InputError: If one of the longest does not fit.
        """
        check_fits(self.of_longest, device, memory_mb)
        return Room(self, budget_bytes(device, memory_mb))


@dataclass(frozen=True, slots=True)
class Room:
    """How many samples fit into memory together.

    Attributes:
        needed: By one sample.
        budget_bytes: For all of a batch.
    """

    needed: MemoryByLength
    budget_bytes: int

    def most(self, length: int) -> int:
        """Return how many samples fit, at least one, if the longest has so many tokens."""
        return max(1, self.needed.at(length).most(self.budget_bytes))


def memory_by_length(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, few: Batch
) -> MemoryByLength:
    """Measure what differentiating takes, see ``sample_memory``.

    Args:
        model: On the samples' device.
        parameters: From ``select_parameters``.
        output: The model output.
        few: Some samples; of texts of different lengths the longest and the shortest are among
            them.

    Returns:
        What one takes, by the length of the longest it is together with.
    """
    what = model, parameters, output
    if few.lengths is None:
        any_one = sample_memory(*what, few)
        return MemoryByLength(0, 0, any_one, any_one)
    lengths = few.lengths.tolist()
    ends = [lengths.index(end) for end in (min(lengths), max(lengths))]
    low, high = (sample_memory(*what, few.rows(slice(i, i + 1))) for i in ends)
    return MemoryByLength(min(lengths), max(lengths), low, high)

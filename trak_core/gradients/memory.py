"""Choose how many samples to differentiate at once, so that they fit into memory.

Texts of different lengths are padded to the longest of their batch: the longer it is, the fewer
texts fit.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from trak_core.autograd.contributions import PIECE
from trak_core.autograd.layout_rules import MixedSamplesError
from trak_core.autograd.one_pass import plan_of
from trak_core.errors import InputError
from trak_core.gradients.batch import Batch, Samples, as_batch, joined
from trak_core.gradients.per_sample import differentiating
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.system.job import is_out_of_memory

T = TypeVar("T")

# What a backward pass holds at its peak, in units of what the forward pass has kept: measured
# for a ResNet and GPT-2-like models of 7 and 124 million parameters, 1.5 to 1.7 for each further
# sample; and what is made of formed gradients, in units of a piece of them.
_ACTIVATIONS, _PIECES = 2, 3
PIECE_BYTES = 4 * PIECE


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """What differentiating takes, a sample.

    Attributes:
        activation_bytes: At the peak, for what is kept on the way to f, and for gradients with
            respect to what is computed from parameters.
        gradient_bytes: Of a gradient as a whole; no more than a piece of all of them is formed.
    """

    activation_bytes: int
    gradient_bytes: int

    def of(self, n_samples: int) -> int:
        """Return the bytes that so many samples take together."""
        formed = min(n_samples * self.gradient_bytes, PIECE_BYTES)
        return n_samples * self.activation_bytes + _PIECES * formed

    def most(self, budget_bytes: int) -> int:
        """Return how many samples take no more than this together."""
        all_formed = budget_bytes // max(1, self.of(1))
        in_pieces = (budget_bytes - _PIECES * PIECE_BYTES) // max(1, self.activation_bytes)
        return max(all_formed, in_pieces)


def sample_memory(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, samples: Samples
) -> SampleMemory:
    """Estimate the memory that differentiating one sample takes, by a forward pass of two.

    Args:
        model: On the samples' device.
        parameters: From ``select_parameters``.
        output: The model output.
        samples: See ``as_batch``; the first counts.

    Returns:
        Bytes for activations and for gradients.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Two samples, so that it can be seen which gradients arrive as rows.
    pair = _pair(as_batch(samples, output))
    with (
        differentiating(model, parameters.values()),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        values = torch.vmap(output.value)(output.read(pair.given_to(model)), pair.labels)
    activations = _ACTIVATIONS * sum(kept.values()) // 2
    if values.requires_grad:
        with contextlib.suppress(MixedSamplesError):
            plan = plan_of(values, list(parameters.values()), 0)
            shapes = [shape for _, shape in plan.arrivals()] if plan else []
            # As they arrive, and on their way down.
            activations += 2 * values.element_size() * sum(map(prod, shapes))
    gradients = sum(p.numel() * p.element_size() for p in parameters.values())
    return SampleMemory(activations, gradients)


def _pair(batch: Batch) -> Batch:
    """Return the first sample twice, in storages of their own: what is kept is counted by those.

    Of a text that others are padded beside, the second is shorter: models take other ways then.
    """
    if batch.lengths is None:
        pair = batch.mapped(lambda tensor: tensor[:1].expand(2, *tensor.shape[1:]))
    else:
        one = batch.rows(slice(0, 1))
        pair = joined([one, one.cut(max(1, one.labels.shape[1] - 1))])
    return pair.mapped(torch.clone)


def budget_bytes(device: torch.device, memory_mb: int) -> int:
    """Return what a batch may take: on CUDA four fifths of the free memory, else ``memory_mb``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 4 // 5
    return memory_mb * 2**20


def check_fits(needed: SampleMemory, device: torch.device, memory_mb: int) -> None:
    """Make sure that one sample fits; see ``samples_that_fit``.

    Raises:
        InputError: If it does not.
    """
    budget = budget_bytes(device, memory_mb)
    if needed.of(1) > budget:
        is_cuda = device.type == "cuda"
        what = "The GPU's free memory" if is_cuda else "compute.memory_mb"
        remedy = "Use a larger GPU" if is_cuda else "Raise it"
        raise InputError(
            f"{what} must hold the gradient of one sample: about {-(-needed.of(1) // 2**20)} MiB. "
            f"Found {budget // 2**20}. {remedy}, or choose fewer `parameters`.",
            code="gradients.memory_limit",
        )


def samples_that_fit(needed: SampleMemory, device: torch.device, memory_mb: int) -> int:
    """Return how many samples fit, at least one.

    Args:
        needed: By one sample, from ``sample_memory``.
        device: Of the model. On CUDA four fifths of its free memory count, whatever ``memory_mb``.
        memory_mb: MiB for arrays on the CPU.

    Raises:
        InputError: If one sample does not fit.
    """
    check_fits(needed, device, memory_mb)
    return needed.most(budget_bytes(device, memory_mb))


def in_chunks(
    compute: Callable[[int, int], T], n_samples: int, chunk: int | Callable[[int], int]
) -> Iterator[tuple[int, int, T]]:
    """Compute chunks of samples, and halve the chunk for good whenever memory runs out.

    Args:
        compute: From start and stop to a result.
        n_samples: How many there are.
        chunk: How many at once at first; or from where on to how many, at least one.

    Yields:
        Start and stop of each chunk, in order, and its result.

    Raises:
        InputError: If memory runs out for a single sample.
    """
    start, share = 0, Fraction(1)
    while start < n_samples:
        most = chunk(start) if callable(chunk) else chunk
        stop = min(start + max(1, int(share * most)), n_samples)
        try:
            result = compute(start, stop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if stop - start == 1:
                found = (str(error).splitlines() or [""])[0]
                raise InputError(
                    "Memory must hold the gradient of one sample. It ran out: "
                    f"{found} Give the job more memory (on a cluster by "
                    "--set-resources RULE:mem_mb=...), or choose fewer `parameters`.",
                    code="gradients.out_of_memory",
                ) from error
            half = (stop - start) // 2
            share = Fraction(half, most)
            print(f"Notice: out of memory; going on with {half} samples at once.", flush=True)
        else:
            yield start, stop, result
            start = stop
            continue
        # After the exception has let go of its tensors.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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

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

from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients.differentiable_model import differentiating
from trak_core.gradients.gradient_terms import PIECE, piece_on
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, joined
from trak_core.gradients.one_pass import plan_of
from trak_core.gradients.recompute_activations import Recomputation
from trak_core.gradients.sample_owner_rules import MixedSamplesError
from trak_core.model_outputs.model_output import ModelOutput, over_samples

T = TypeVar("T")

# Peak memory of a backward pass, in units of what the forward pass has saved; measured for a ResNet
# and GPT-2-like models of 7 and 124 million parameters: 1.5 to 1.7 for each further sample.
_ACTIVATIONS = 2
# Copies of a piece of formed gradients that a consumer holds.
_PIECES = 3
PIECE_BYTES = 4 * PIECE


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """Memory that differentiating takes, for each sample.

    Attributes:
        activation_bytes: Peak of what is saved on the way to f, and of gradients with respect to
            tensors that are computed from parameters.
        gradient_bytes: Size of a whole gradient; at most a piece of all gradients is formed.
        shared_bytes: What any number of samples takes once.
    """

    activation_bytes: int
    gradient_bytes: int
    shared_bytes: int = 0

    def of(self, n_samples: int) -> int:
        """Return the bytes that ``n_samples`` take together."""
        formed = min(n_samples * self.gradient_bytes, PIECE_BYTES)
        return n_samples * self.activation_bytes + _PIECES * formed + self.shared_bytes

    def most(self, budget_bytes: int) -> int:
        """Return how many samples together take no more than ``budget_bytes``."""
        budget_bytes -= self.shared_bytes
        all_formed = budget_bytes // max(1, self.of(1) - self.shared_bytes)
        in_pieces = (budget_bytes - _PIECES * PIECE_BYTES) // max(1, self.activation_bytes)
        return max(all_formed, in_pieces)


class TooMuchMemoryError(Exception):
    """A sample's activations take more than they may."""


def sample_memory(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    blocks: Recomputation | None = None,
    most_bytes: int | None = None,
    n_copies: int = 2,
) -> SampleMemory:
    """Return an estimate of the memory that differentiating the first sample takes.

    A forward pass shows it, whatever the numbers in the sample; ``blocks`` are those of the model
    that run twice. The pass has ``n_copies``: two show which gradients arrive as rows; one is
    enough where no other sample is ever beside it. If activations take more than ``most_bytes``,
    there is a ``TooMuchMemoryError``. Measuring stops there: no more are held.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}
    n_saved = 0
    if blocks is not None:
        blocks.begin_count()
    held: list[list[Tensor]] = []

    def is_too_much() -> bool:
        return most_bytes is not None and _ACTIVATIONS * n_saved // n_copies > most_bytes

    def save(tensor: Tensor) -> list[Tensor]:
        nonlocal n_saved
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            n_saved += storage.nbytes() - saved.get(storage.data_ptr(), 0)
            saved[storage.data_ptr()] = storage.nbytes()
        # A tensor itself would keep its graph alive for good, and so would an error here.
        place = [tensor.detach()]
        held.append(place)
        while is_too_much() and held:
            held.pop().clear()
        return place

    def unpack(place: list[Tensor]) -> Tensor:
        if not place:  # the model itself differentiates
            raise TooMuchMemoryError
        return place[0]

    batch = as_batch(samples, output)
    given = batch.rows(slice(0, 1)) if n_copies == 1 else _pair(batch)
    with (
        differentiating(model, parameters.values()),
        torch.autograd.graph.saved_tensors_hooks(save, unpack),
    ):
        values = over_samples(output.value, output.read(given.given_to(model)), given.labels)
    if is_too_much():
        raise TooMuchMemoryError
    n_bytes = n_saved + (blocks.n_bytes(own | set(saved)) if blocks else 0)
    activations = _ACTIVATIONS * n_bytes // n_copies
    if values.requires_grad:
        with contextlib.suppress(MixedSamplesError, UnreadableGraphError):
            plan = plan_of(values, list(parameters.values()), 0)
            shapes = [shape for _, shape in plan.arrivals()] if plan else []
            # Twice: as they arrive, and on their way down.
            activations += 2 * values.element_size() * sum(map(prod, shapes))
    gradients = sum(p.numel() * p.element_size() for p in parameters.values())
    return SampleMemory(activations, gradients)


def _pair(batch: Batch) -> Batch:
    """Return the first sample twice, in storages of their own, by which saved bytes are counted.

    For padded texts the second copy is one token shorter, so that the padding code path is measured
    too.
    """
    if batch.lengths is None:
        pair = batch.mapped(lambda tensor: tensor[:1].expand(2, *tensor.shape[1:]))
    else:
        text = batch.rows(slice(0, 1))
        pair = joined([text, text.cut(max(1, text.labels.shape[1] - 1))])
    return pair.mapped(torch.clone)


def budget_bytes(device: torch.device, memory_mb: int) -> int:
    """Return what a batch may take: ``memory_mb`` MiB, or most of a CUDA device's free memory.

    What a GPU's larger pieces take beyond a CPU's is not for the batch.
    """
    if device.type == "cuda":
        larger_pieces = _PIECES * 4 * (piece_on(device) - PIECE)
        return torch.cuda.mem_get_info(device)[0] * 4 // 5 - larger_pieces
    return memory_mb * 2**20


def _checked_budget(needed: SampleMemory, device: torch.device, memory_mb: int) -> int:
    """Return what a batch may take, at least one sample's bytes; see ``samples_that_fit``."""
    is_cuda, budget = device.type == "cuda", budget_bytes(device, memory_mb)
    if needed.of(1) > budget:
        memory = "The GPU's free memory" if is_cuda else "compute.memory_mb"
        remedy = "Use a larger GPU" if is_cuda else "Raise it"
        raise InputError(
            f"{memory} must hold the gradient of one sample: about "
            f"{-(-needed.of(1) // 2**20)} MiB. "
            f"Found {budget // 2**20}. {remedy}, or choose fewer `parameters`.",
            code="gradients.memory_limit",
        )
    return budget


def samples_that_fit(needed: SampleMemory, device: torch.device, memory_mb: int) -> int:
    """Return how many samples fit, at least one; refuse a sample that doesn't.

    The budget is ``memory_mb`` MiB on the CPU, and four fifths of a CUDA device's free memory.
    """
    return needed.most(_checked_budget(needed, device, memory_mb))


def in_chunks(
    compute: Callable[[int, int], T], n_samples: int, chunk: int | Callable[[int], int]
) -> Iterator[tuple[int, int, T]]:
    """Compute chunks of samples, and halve the chunk for good whenever memory runs out.

    ``compute`` takes start and stop; ``chunk`` is the samples at once, or gives them from a start.
    Memory that runs out for a single sample is an ``InputError``.

    Yields:
        Start and stop of each chunk, in order, and its result.
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
                message = (str(error).splitlines() or [""])[0]
                raise InputError(
                    "Memory must hold the gradient of one sample. It ran out: "
                    f"{message} Give the job more memory (on a cluster by "
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
    """Memory that differentiating a sample takes, by the tokens of the longest text of its batch.

    ``shortest`` and ``longest`` are tokens of texts, 0 if all samples have one shape.
    """

    shortest: int
    longest: int
    of_shortest: SampleMemory
    of_longest: SampleMemory

    def at(self, length: int) -> SampleMemory:
        """Return the most that a text takes in a batch whose longest text has ``length`` tokens.

        Activations grow with the tokens and, in attention, with their square, so that a straight
        line between two measurements is an upper bound.
        """
        low, high = self.of_shortest, self.of_longest
        if self.shortest == self.longest:
            return high
        assert length <= self.longest
        part = max(0, length - self.shortest) / (self.longest - self.shortest)
        more = high.activation_bytes - low.activation_bytes
        return replace(high, activation_bytes=low.activation_bytes + int(part * more))

    def mapped(self, function: Callable[[SampleMemory], SampleMemory]) -> "MemoryByLength":
        """Return the memory of another use of the model, a function of that of differentiating."""
        low, high = function(self.of_shortest), function(self.of_longest)
        return MemoryByLength(self.shortest, self.longest, low, high)

    def room(self, device: torch.device, memory_mb: int) -> "Room":
        """Return the budget as it is now, for all batches; the longest text must fit alone."""
        return Room(self, _checked_budget(self.of_longest, device, memory_mb))


@dataclass(frozen=True, slots=True)
class Room:
    """Number of samples that fit into ``budget_bytes`` together."""

    needed: MemoryByLength
    budget_bytes: int

    def most(self, length: int) -> int:
        """Return how many samples fit, at least one, if the longest has ``length`` tokens."""
        return max(1, self.needed.at(length).most(self.budget_bytes))


def memory_by_length(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    few: Batch,
    blocks: Recomputation | None = None,
    most_bytes: int | None = None,
) -> MemoryByLength:
    """Return the memory of differentiating, measured as by ``sample_memory``, by text length.

    Among texts of different lengths, ``few`` must have the longest and the shortest. One sample is
    all that there is.
    """
    if few.lengths is None:
        n_copies = min(2, len(few))
        needed = sample_memory(model, parameters, output, few, blocks, most_bytes, n_copies)
        return MemoryByLength(0, 0, needed, needed)
    lengths = few.lengths.tolist()
    high, low = (
        sample_memory(model, parameters, output, few.rows(slice(i, i + 1)), blocks, most_bytes)
        for i in (lengths.index(max(lengths)), lengths.index(min(lengths)))
    )
    return MemoryByLength(min(lengths), max(lengths), low, high)

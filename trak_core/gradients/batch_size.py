"""Determine the largest batch whose gradients can be computed in the available memory."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, first_line, is_out_of_memory
from trak_core.gradients.differentiable_model import differentiating
from trak_core.gradients.gradient_terms import PIECE, max_piece_entries
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, joined
from trak_core.gradients.one_pass import plan_of
from trak_core.gradients.recompute_activations import Recomputation
from trak_core.model_outputs.model_output import ModelOutput, over_samples
from trak_core.runtime.progress import print_line

T = TypeVar("T")

# Ratio of a backward pass's peak memory to the memory of the tensors that the forward pass saves.
# The measured ratio was 1.5 to 1.7 for a ResNet and for GPT-2-like models of 7 and 124 million
# parameters. The value 2 leaves a margin.
_ACTIVATIONS = 2
# Gradients and logits are computed in pieces, to save memory. At most ``_PIECES`` pieces of
# gradients and ``_LOGIT_PIECES`` pieces of logits are in memory at the same time.
_PIECES, _LOGIT_PIECES = 3, 4
PIECE_BYTES = 4 * PIECE


@dataclass(frozen=True, slots=True)
class SampleMemory:
    """The memory, in bytes, that computing the per-sample gradients of a batch needs."""

    # Peak memory for one sample: the tensors that the forward pass saves, the tensors of the
    # backward pass, and stored gradients with respect to tensors that depend on parameters alone.
    activation_bytes: int
    gradient_bytes: int  # size of the gradient of one sample
    shared_bytes: int = 0  # memory that is needed once, for any number of samples

    def bytes_of(self, n_samples: int) -> int:
        """Return the memory that a batch of ``n_samples`` samples needs."""
        formed = min(n_samples * self.gradient_bytes, PIECE_BYTES)
        return n_samples * self.activation_bytes + _PIECES * formed + self.shared_bytes

    def most(self, budget_bytes: int) -> int:
        """Return the size of the largest batch that needs at most ``budget_bytes``."""
        budget_bytes -= self.shared_bytes
        all_formed = budget_bytes // max(1, self.bytes_of(1) - self.shared_bytes)
        in_pieces = (budget_bytes - _PIECES * PIECE_BYTES) // max(1, self.activation_bytes)
        return max(all_formed, in_pieces)


class TooMuchMemoryError(Exception):
    """The activations of one sample need more memory than ``sample_memory`` was allowed to use."""


def sample_memory(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
    blocks: Recomputation | None = None,
    most_bytes: int | None = None,
    n_copies: int = 2,
) -> SampleMemory:
    """Return an estimate of the memory that is needed to compute the first sample's gradient.

    The function runs a forward pass for a batch of ``n_copies`` copies of the sample, and counts
    the bytes that autograd saves. If an operation mixes samples, per-sample gradients with respect
    to its inputs must be stored. The estimate includes these gradients only if the batch contains
    at least two copies. ``blocks`` are the model's blocks, if any, whose activations are recomputed
    in the backward pass.

    Raises:
        TooMuchMemoryError: If the activations of one sample need more than ``most_bytes``. When
            this limit is exceeded, the function frees saved tensors and doesn't run out of memory.
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
        # Saving the tensor without detaching it, or raising an error in this function, would create
        # a reference cycle through the graph, so that the graph's memory would never be freed.
        cell = [tensor.detach()]
        held.append(cell)
        while is_too_much() and held:
            held.pop().clear()
        return cell

    def unpack(cell: list[Tensor]) -> Tensor:
        # Autograd calls this function if ``forward`` itself computes gradients. By this time,
        # ``save`` may have freed the tensor.
        if not cell:
            raise TooMuchMemoryError
        return cell[0]

    batch = as_batch(samples, output)
    given = batch.rows(slice(0, 1)) if n_copies == 1 else _pair(batch)
    with (
        differentiating(model, parameters.values()),
        torch.autograd.graph.saved_tensors_hooks(save, unpack),
    ):
        values = over_samples(output.value, output.read(given.given_to(model)), given.labels)
    if is_too_much():
        raise TooMuchMemoryError
    n_bytes = n_saved + (blocks.peak_bytes(own | set(saved)) if blocks else 0)
    activations = _ACTIVATIONS * n_bytes // n_copies
    if values.requires_grad:
        with contextlib.suppress(UnreadableGraphError):
            plan = plan_of(values, list(parameters.values()), 0)
            shapes = [shape for _, shape in plan.formed_inputs()]
            # The factor 2 is for two gradients: one with respect to the tensor that samples share,
            # and one with respect to the parameter from which this tensor is computed.
            activations += 2 * values.element_size() * sum(map(prod, shapes))
    gradients = sum(p.numel() * p.element_size() for p in parameters.values())
    return SampleMemory(activations, gradients)


def _pair(batch: Batch) -> Batch:
    """Return a batch of two copies of the first sample of ``batch``.

    The copies share no memory with ``batch`` or each other, because ``sample_memory`` counts each
    storage only once. If the sample is a text, the second copy is one token shorter, so that the
    model's code for padding also runs.
    """
    if batch.lengths is None:
        pair = batch.mapped(lambda tensor: tensor[:1].expand(2, *tensor.shape[1:]))
    else:
        text = batch.rows(slice(0, 1))
        pair = joined([text, text.cut(max(1, text.labels.shape[1] - 1))])
    return pair.mapped(torch.clone)


def budget_bytes(device: torch.device, memory_mb: int) -> int:
    """Return the bytes that a batch may use: ``memory_mb`` MiB, or 4/5 of a GPU's free memory.

    Gradients and logits are computed in pieces. ``SampleMemory`` assumes pieces of the size that is
    used on a CPU. On a GPU, pieces are larger, so the budget is reduced by the difference.
    """
    if device.type == "cuda":
        larger_pieces = (_PIECES + _LOGIT_PIECES) * 4 * (max_piece_entries(device) - PIECE)
        return torch.cuda.mem_get_info(device)[0] * 4 // 5 - larger_pieces
    return memory_mb * 2**20


def in_chunks(
    compute: Callable[[int, int], T], n_samples: int, chunk: int | Callable[[int], int]
) -> Iterator[tuple[int, int, T]]:
    """Call ``compute(start, stop)`` for chunks of samples, and halve chunks if memory runs out.

    ``chunk`` is the number of samples in a chunk, or a function that returns this number for the
    index of a chunk's first sample.

    Yields:
        For each chunk in order: ``start``, ``stop`` and the result of ``compute(start, stop)``.

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
                raise InputError(
                    "The gradient of one sample must fit into memory. Memory ran out with the "
                    f"error: {first_line(error)} Give the job more memory (on a cluster, by "
                    "--set-resources RULE:mem_mb=...), or choose fewer `parameters`.",
                    code="gradients.out_of_memory",
                ) from error
            half = (stop - start) // 2
            share = Fraction(half, most)
            print_line(f"Notice: out of memory. Continuing with batches of {half} samples.")
        else:
            yield start, stop, result
            start = stop
            continue
        # The cache is emptied after the ``except`` block, because the error's traceback keeps the
        # tensors of the failed call in memory until the block ends.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class MemoryByLength:
    """The memory that computing a text's gradient needs, as a function of the padded length.

    ``shortest`` and ``longest`` are the numbers of tokens of the shortest and of the longest text,
    or 0 if all samples have the same shape. ``of_shortest`` and ``of_longest`` are the memory that
    was measured for these two texts.
    """

    shortest: int
    longest: int
    of_shortest: SampleMemory
    of_longest: SampleMemory

    def at(self, length: int) -> SampleMemory:
        """Return an upper bound of the memory for a text that is padded to ``length`` tokens.

        The activations of n tokens take about a n + b n^2 bytes, where the square comes from
        attention. This function of n is convex, so the straight line through the measurements of
        the shortest and the longest text is an upper bound.
        """
        low, high = self.of_shortest, self.of_longest
        if self.shortest == self.longest:
            return high
        part = max(0, length - self.shortest) / (self.longest - self.shortest)
        more = high.activation_bytes - low.activation_bytes
        return replace(high, activation_bytes=low.activation_bytes + int(part * more))

    def mapped(self, function: Callable[[SampleMemory], SampleMemory]) -> "MemoryByLength":
        low, high = function(self.of_shortest), function(self.of_longest)
        return replace(self, of_shortest=low, of_longest=high)

    def room(self, device: torch.device, memory_mb: int) -> "MemoryBudget":
        """Return the memory budget of a batch. Raise an error if the longest text needs more."""
        budget, needed = budget_bytes(device, memory_mb), self.of_longest.bytes_of(1)
        if needed > budget:
            memory, remedy = "compute.memory_mb", "Raise compute.memory_mb"
            if device.type == "cuda":
                memory, remedy = "The GPU's free memory", "Use a larger GPU"
            raise InputError(
                f"{memory} must be at least {-(-needed // 2**20)} MiB, which the gradient of one "
                f"sample needs. Found {budget // 2**20} MiB. {remedy}, or choose fewer "
                "`parameters`.",
                code="gradients.memory_limit",
            )
        return MemoryBudget(self, budget)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that a batch may use, in bytes, and the memory that samples need."""

    needed: MemoryByLength
    budget_bytes: int

    def most(self, length: int) -> int:
        """Return how many texts of ``length`` tokens fit into the budget, but at least 1."""
        return max(1, self.needed.at(length).most(self.budget_bytes))


def memory_by_length(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    few: Batch,
    blocks: Recomputation | None = None,
    most_bytes: int | None = None,
) -> MemoryByLength:
    """Return the memory that computing gradients needs, as measured for samples in ``few``.

    If samples are texts, ``sample_memory`` measures the shortest and the longest text of ``few``.
    Otherwise, it measures the first sample.
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

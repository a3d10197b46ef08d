"""Sides of a benchmark beside an ordinary training step: in turn in one process, one thread each.

The floor is a forward and backward pass of the batch with ordinary weight gradients. Times are CPU
seconds, on a GPU the wall's; ratios are over the floor's median. Memory is measured in a process
for each side, which the same script is with ``--peak SIDE``: what the side adds at its peak to what
was there before it, the model included. A GPU's is what torch allocates there. From trak_core only
what needs torch alone is imported, because the environments of other packages have no more.
"""

import ctypes
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import seconds_now
from torch import nn

from trak_core.gradients import Batch
from trak_core.model_outputs.model_output import ModelOutput

FLOOR = "floor"
HEADER = "| model | k | side | ms a sample | floors | MB a sample |\n|---|---|---|---|---|---|"


def floor(model: nn.Module, output: ModelOutput, batch: Batch) -> None:
    """Take an ordinary forward and backward pass."""
    model.zero_grad(set_to_none=True)
    outputs = output.read(batch.given_to(model))
    torch.vmap(output.value)(outputs, batch.labels).sum().backward()
    model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Row:
    """What one side takes; ``parameters`` says which are differentiated."""

    model: str
    parameters: str
    n_params: int
    proj_dim: int
    side: str
    ms_a_sample: float
    floors: float
    least: float
    greatest: float
    mb_a_sample: float

    def __str__(self) -> str:
        """Return a line of the table."""
        ms, mb = (f"{float(f'{x:.3g}'):,g}" for x in (self.ms_a_sample, self.mb_a_sample))
        return (
            f"| {self.model} | {self.proj_dim} | {self.side} | {ms} | "
            f"{self.floors:.2f} [{self.least:.2f}-{self.greatest:.2f}] | {mb} |"
        )


def seconds_of(
    sides: dict[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Return each side's times in rounds where all take turns, after one that warms up."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, call in sides.items():
            start = seconds_now(device)
            call()
            seconds[side].append(seconds_now(device) - start)
    return {side: taken[1:] for side, taken in seconds.items()}


def _peak_kib() -> int:
    """Return the most that this process has taken so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def print_peak(call: Callable[[], object]) -> None:
    """Print what a call adds at its peak, in KiB, for ``measured`` in another process."""
    ctypes.CDLL(None).malloc_trim(0)  # what setting up freed
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # and the peak so far
    before = _peak_kib()
    call()
    print("peak", _peak_kib() - before)


def _peak_on_gpu(call: Callable[[], object]) -> int:
    """Return the bytes that a call adds at its peak to what torch has allocated on the GPU."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def measured(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    n_samples: int,
    row: Callable[..., Row],
    arguments: Sequence[str] | None,
    device: str = "cpu",
) -> Iterator[Row]:
    """Time the sides, then yield a row for each, printed.

    Args:
        sides: Calls by name, the floor among them.
        rounds: That count.
        n_samples: Samples of the batch that each call takes.
        row: A ``Row`` without what is measured.
        arguments: For this script, to measure this model: ``--peak SIDE`` is added. None for no
            memory.
        device: Where the sides compute.
    """
    seconds = seconds_of(sides, rounds, device)
    unit = statistics.median(seconds[FLOOR])
    for side, taken in seconds.items():
        output = "nan"
        if device == "cuda":
            output = str(_peak_on_gpu(sides[side]) / 1024)
        elif arguments is not None:
            command = [sys.executable, sys.argv[0], *arguments, "--peak", side]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = row(
            side=side,
            ms_a_sample=1000 * statistics.median(taken) / n_samples,
            floors=statistics.median(taken) / unit,
            least=min(taken) / unit,
            greatest=max(taken) / unit,
            mb_a_sample=float(output.split()[-1]) * 1024 / 1e6 / n_samples,
        )
        print(found, flush=True)
        yield found

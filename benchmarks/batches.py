"""How many samples to differentiate at once: time a sample by batch, features by one pass.

    python benchmarks/batches.py digits resnet 7M 30M --csv batches.csv

The models are those of ``large_models.py``, with the kind of projection that the pipeline takes for
their size, and with freed memory kept as jobs keep it. All batches take turns; the medians of the
rounds' CPU seconds count, one thread. A batch is a row if the pipeline would take it within
``--memory``, MiB. MiB a sample are those that the pipeline measures a batch by. Ratios are over a
batch of 64, or over the largest.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from large_models import TOKENS, Case, case_of, ours
from machine import environment, write_csv
from sides import seconds_of

from trak_core.gradients import Batch, sample_memory
from trak_core.spec import usual_kind
from trak_core.system.job import keep_freed

_SIZES = (1, 4, 16, 32, 64, 128, 256, 512)
_AT_LEAST = 16  # samples that are timed together


@dataclass(frozen=True)
class Row:
    """What a batch takes."""

    model: str
    n_params: int
    kind: str
    mib_a_sample: float
    batch: int
    ms_a_sample: float
    over_64: float


def _features(case: Case, kind: str, batch: Batch, n_calls: int) -> None:
    for _ in range(n_calls):
        ours(case, kind, batch)


def _rows(name: str, rounds: int, budget_bytes: int) -> list[Row]:
    """Time a model with all batches that fit."""
    case = case_of(name, False, None, None, TOKENS)
    n_params = sum(p.numel() for p in case.parameters.values())
    kind = usual_kind(n_params, case.proj_dim)
    memory = sample_memory(case.model, case.parameters, case.output, case.batch)
    sizes = [size for size in _SIZES if size <= memory.most(budget_bytes)]
    n_calls = {size: max(1, _AT_LEAST // size) for size in sizes}
    sides: dict[str, Callable[[], object]] = {}
    for size in sizes:
        batch = case.batch.rows(torch.arange(size) % len(case.batch))
        sides[str(size)] = partial(_features, case, kind, batch, n_calls[size])
    taken = seconds_of(sides, rounds)
    ms = [1000 * statistics.median(taken[str(n)]) / (n * n_calls[n]) for n in sizes]
    usual = ms[sizes.index(64)] if 64 in sizes else ms[-1]
    mib = memory.activation_bytes / 2**20
    return [
        Row(name, n_params, kind, mib, size, one, one / usual)
        for size, one in zip(sizes, ms, strict=True)
    ]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, default=1000)
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed()
    about = environment("cpu", ("torch", "numpy", "numba", "transformers"))
    print(about)
    print("| model | kind | MiB a sample | batch | ms a sample | over 64 |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in asked.models:
        for row in _rows(name, asked.rounds, asked.memory * 2**20):
            rows.append(row)
            numbers = f"{row.batch} | {row.ms_a_sample:.3g} | {row.over_64:.2f}"
            print(f"| {name} | {row.kind} | {row.mib_a_sample:.3g} | {numbers} |", flush=True)
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

"""How many samples to differentiate at once: time a sample by batch, features by one pass.

    python benchmarks/batches.py digits resnet 7M 30M --csv batches.csv

The models are those of ``large_models.py``, with the kind of projection that the pipeline takes for
their size. All batches take turns; the medians of the rounds' CPU seconds count, one thread. A
batch is a row if the pipeline would take it within ``--memory``, MiB. MiB a sample are those that
the pipeline measures a batch by.
"""

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from large_models import Case, case_of, ours
from machine import environment, write_csv
from sides import cpu_seconds

from trak_core.gradients import Batch, sample_memory
from trak_core.spec import usual_kind

_SIZES = (1, 4, 16, 32, 64, 128, 256, 512)


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


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, default=1000)
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "numpy", "numba", "transformers"))
    print(about)
    print(
        "| model | kind | MiB a sample | batch | ms a sample | over 64 |\n|---|---|---|---|---|---|"
    )
    rows = []
    for name in asked.models:
        case = case_of(name, False, None)
        n_params = sum(p.numel() for p in case.parameters.values())
        kind = usual_kind(n_params, case.proj_dim)
        what = case.model, case.parameters, case.output
        memory = sample_memory(*what, case.batch)
        most = memory.most(asked.memory * 2**20)
        batches = {
            size: case.batch.rows(torch.arange(size) % len(case.batch))
            for size in _SIZES
            if size <= most
        }
        n_calls = {size: max(1, 64 // size) for size in batches}
        taken = cpu_seconds(
            {
                str(size): partial(_features, case, kind, batch, n_calls[size])
                for size, batch in batches.items()
            },
            asked.rounds,
        )
        medians = {
            size: 1000 * statistics.median(taken[str(size)]) / (size * n_calls[size])
            for size in batches
        }
        usual = medians.get(64, medians[max(medians)])
        for size, ms in medians.items():
            mib = memory.activation_bytes / 2**20
            rows.append(Row(name, n_params, kind, mib, size, ms, ms / usual))
            print(
                f"| {name} | {kind} | {mib:.3g} | {size} | {ms:.3g} | {ms / usual:.2f} |",
                flush=True,
            )
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

"""Measure the overhead of Python and torch calls in features of very small models.

    python benchmarks/host_cost.py --csv host_cost.csv

The models are a GPT-2 of 12 layers and width 16 for two texts of 8 tokens, and a network of two
layers for 32 images of 8 x 8 pixels. The floor is an ordinary forward and backward pass of the same
batch. In each round, the methods run in turn on one thread, with several calls each. The table has
medians of CPU seconds over the rounds. Features are first compared with those of autograd's
gradients.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from large_models import Case, check, ours
from shared import FLOOR, environment, floor, seconds_of, write_csv
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from trak_core.gradients import as_batch, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.runtime.job import keep_freed_memory

_KINDS = ("hadamard", "rademacher", "normal", "tensor_sketch")
_PROJ_DIM = 64
_CALLS = 10  # timed together


@dataclass(frozen=True)
class Row:
    """The time of one method."""

    model: str
    side: str
    ms: float
    floors: float


def _gpt2() -> Case:
    """Return a GPT-2 of 12 layers with next to no arithmetic."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=12, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    model, ids = GPT2LMHeadModel(config).eval(), torch.randint(0, 64, (2, 8))
    batch = as_batch({"input_ids": ids, "labels": ids}, LANGUAGE_MODELLING)
    return Case("gpt2", model, select_parameters(model, None), LANGUAGE_MODELLING, batch, _PROJ_DIM)


def _mlp() -> Case:
    """Return a network for images of digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    batch = as_batch((torch.rand(32, 64), torch.randint(0, 10, (32,))), CLASSIFICATION)
    return Case("mlp", model, select_parameters(model, None), CLASSIFICATION, batch, _PROJ_DIM)


def _several(function: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        function()


def _rows(case: Case, rounds: int) -> list[Row]:
    """Return the times of a model with each kind of projection."""
    sides: dict[str, Callable[[], object]] = {
        FLOOR: partial(floor, case.model, case.output, case.batch)
    }
    for kind in _KINDS:
        check(case, kind)
        sides[kind] = partial(ours, case, kind)
    taken = seconds_of({side: partial(_several, call) for side, call in sides.items()}, rounds)
    ms = {side: 1000 * statistics.median(taken[side]) / _CALLS for side in sides}
    return [Row(case.name, side, ms[side], ms[side] / ms[FLOOR]) for side in sides]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    about = environment("cpu", ("torch", "numpy", "numba", "transformers"))
    print(about)
    print("| model | side | ms a batch | floors |\n|---|---|---|---|")
    rows = []
    for case in (_gpt2(), _mlp()):
        for row in _rows(case, asked.rounds):
            rows.append(row)
            print(f"| {row.model} | {row.side} | {row.ms:.3g} | {row.floors:.2f} |", flush=True)
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

"""Compare time and memory of the Gramian engine with torchjd's, in one run.

    pip install torchjd
    python benchmarks/gramian.py --threads 2 --csv gramian.csv

A pass is a forward pass, a loss for each sample, and the Gramian. Each model's Gramian is first
compared with torchjd's in float64, and models whose Gramians differ are not timed. Then both
engines alternate, and the median of the repeats is reported. Memory is measured in a separate
process for each engine and case. It is the peak minus the memory before the pass, when the model
and the data are already in memory. Ratios are this package's value over torchjd's. The script
prints a Markdown table. --csv writes the same rows with the device, the versions and the commit.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shared import environment, peak_on_gpu, print_peak, seconds_of, write_csv
from torch import Tensor, nn

from trak_core.gramian import Engine

CLASSES = 10


class Encoder(nn.Module):
    """A transformer encoder over 32 positions, without dropout because torchjd can't use it."""

    def __init__(self) -> None:
        """Four layers of width 128."""
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.last(self.layers(self.first(x)).mean(1))


def mlp() -> nn.Module:
    """Return a network of three layers, as for 28 x 28 pixels."""
    return nn.Sequential(
        *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()), nn.Linear(512, CLASSES)
    )


def cifar_cnn() -> nn.Module:
    """Return a network of six convolutions with GroupNorm, as for CIFAR-10."""
    widths = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    layers: list[nn.Module] = []
    for n_in, n_out, stride in widths:
        layers += [
            nn.Conv2d(n_in, n_out, 3, padding=1, stride=stride),
            nn.GroupNorm(8, n_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def alexnet() -> nn.Module:
    """Return a network with AlexNet's sizes, for images of 224 x 224 and ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1)),
        *(nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, CLASSES),
    )


# Models, sample shapes and batch sizes. With 32 samples of AlexNet, torchjd takes over 20 GB.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "MLP": (mlp, (784,), (8, 16, 32, 64)),
    "CIFAR CNN": (cifar_cnn, (3, 32, 32), (8, 16, 32, 64)),
    "transformer encoder": (Encoder, (32, 32), (8, 16, 32, 64)),
    "AlexNet": (alexnet, (3, 224, 224), (8, 16)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Seconds are medians over passes, and bytes are peaks."""

    model: str
    n_params: int
    batch: int
    threads: int
    seconds: float
    peer_seconds: float
    time_ratio: float
    peak_bytes: int
    peer_peak_bytes: int
    memory_ratio: float


class Side:
    """A model and one of the two engines for it."""

    def __init__(self, case: str, side: str, device: str, dtype: torch.dtype = torch.float32):
        """Make a model with the same weights for both engines."""
        make, self.shape, _ = CASES[case]
        torch.manual_seed(0)
        self.model = make().to(device, dtype)
        if side == "peer":
            from torchjd import autogram

            self.engine: Any = autogram.Engine(self.model, batch_dim=0)
        else:
            self.engine = Engine(self.model, batch_dim=0)
        self.device, self.dtype = device, dtype

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return samples and labels, which are the same for both engines."""
        torch.manual_seed(1)
        samples = torch.randn(batch, *self.shape).to(self.device, self.dtype)
        return samples, torch.randint(0, CLASSES, (batch,)).to(self.device)

    def run(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Run one pass."""
        losses = nn.functional.cross_entropy(self.model(samples), labels, reduction="none")
        return self.engine.compute_gramian(losses)


def check(case: str, device: str) -> None:
    """Compare the two engines in float64; raise SystemExit if they differ."""
    ours, peer = (Side(case, side, device, torch.float64) for side in ("ours", "peer"))
    data = ours.data(3)
    found, expected = ours.run(*data), peer.run(*data)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < 1e-6:
        sys.exit(f"{case}: the two engines differ by {error:.3g}: not timed")


def in_turn(case: str, batch: int, repeats: int, device: str) -> tuple[float, float]:
    """Return the median wall seconds of both engines, which alternate."""
    sides = {side: Side(case, side, device) for side in ("ours", "peer")}
    data = sides["ours"].data(batch)
    calls: dict[str, Callable[[], object]]
    calls = {name: partial(side.run, *data) for name, side in sides.items()}
    seconds = seconds_of(calls, repeats, device, by_clock=True)
    return statistics.median(seconds["ours"]), statistics.median(seconds["peer"])


def peak_bytes(case: str, side: str, batch: int, device: str, threads: int) -> int:
    """Return the bytes that a pass adds at its peak, on a CPU measured in a separate process."""
    if device == "cuda":
        made = Side(case, side, device)
        data = made.data(batch)
        made.run(*made.data(2))  # what libraries keep for good is not a pass's
        return peak_on_gpu(lambda: made.run(*data))
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", case, side]
    result = subprocess.run(
        [*command, str(batch)],
        capture_output=True,
        text=True,
        check=False,
        # Freed memory is returned immediately, so that the peak is that of the memory in use.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    if result.returncode:
        sys.exit(f"{case}, {side}, batch {batch}:\n{result.stderr}")
    return int(result.stdout.split()[-1]) * 1024


def measure(case: str, batch: int, arguments: argparse.Namespace) -> Row:
    """Measure one line of the table."""
    seconds, peer_seconds = in_turn(case, batch, arguments.repeats, arguments.device)
    peak, peer_peak = (
        peak_bytes(case, side, batch, arguments.device, arguments.threads)
        for side in ("ours", "peer")
    )
    n_params = sum(p.numel() for p in CASES[case][0]().parameters())
    return Row(
        case,
        n_params,
        batch,
        arguments.threads,
        seconds,
        peer_seconds,
        seconds / peer_seconds,
        peak,
        peer_peak,
        peak / peer_peak,
    )


def markdown(rows: list[Row]) -> str:
    """Return the rows as a Markdown table, and the means of their ratios."""
    lines = [
        "| model | parameters | batch | ours, ms | peer, ms | ratio "
        "| ours, MiB | peer, MiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {row.n_params:,} | {row.batch} | {row.seconds * 1e3:,.1f} | "
        f"{row.peer_seconds * 1e3:,.1f} | {row.time_ratio:.2f} | {row.peak_bytes / 2**20:,.0f} | "
        f"{row.peer_peak_bytes / 2**20:,.0f} | {row.memory_ratio:.2f} |"
        for row in rows
    ]

    def mean(values: list[float]) -> float:
        return math.exp(statistics.mean(math.log(value) for value in values))

    lines += [
        "",
        f"geometric mean of times {mean([row.time_ratio for row in rows]):.2f}, "
        f"of memory {mean([row.memory_ratio for row in rows]):.2f}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of both sides, on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # for one peak
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        case, side, batch = arguments.peak
        made = Side(case, side, "cpu")
        data = made.data(int(batch))
        made.run(*made.data(2))  # what libraries keep for good is not a pass's
        print_peak(lambda: made.run(*data))
        return
    about = environment(arguments.device, ("torch", "torchjd"))
    print(", ".join(f"{key} {value}" for key, value in about.items()), "\n", flush=True)
    rows = []
    for case in arguments.models:
        check(case, arguments.device)
        for batch in CASES[case][2]:
            row = measure(case, batch, arguments)
            rows.append(row)
            print(
                f"{case}, {batch}: time {row.time_ratio:.2f}, memory {row.memory_ratio:.2f}",
                file=sys.stderr,
                flush=True,
            )
    print(markdown(rows))
    if arguments.csv:
        write_csv(arguments.csv, rows, about)


if __name__ == "__main__":
    main()

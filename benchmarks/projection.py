"""Compare the speed of the projection with other packages', in one process.

    python benchmarks/projection.py --threads 2 --csv projection.csv

The other packages are in the extra `test`, except for fast_jl.

For each row, the result is first compared with the definition of the matrix (for another package,
the test is whether its result is a projection). A row that fails is not timed. Both packages run in
turn, the median of the calls is reported, and the ratio is the other package's time over ours. The
script prints a Markdown table. --csv writes the same rows with the device, the versions and the
commit. --device cuda measures on a GPU, with fast_jl if it can be imported.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import environment, write_csv

from trak_core.projection import project
from trak_core.projection.reference import projection_matrix
from trak_core.settings import ProjectionKind, ProjectionSpec

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Seconds are medians, and ``ratio`` is the peer's time over ours."""

    kind: str
    peer: str
    dtype: str
    n_samples: int
    n_params: int
    proj_dim: int
    threads: int
    seconds: float
    peer_seconds: float
    ratio: float
    target: float | None


def spec_of(kind: str, n_params: int, proj_dim: int) -> ProjectionSpec:
    """Return a projection with seed 0."""
    return ProjectionSpec(
        kind=ProjectionKind(kind), n_params=n_params, proj_dim=proj_dim, seed=0, stream=0
    )


def check(kind: str, proj_dim: int, device: str, dtype: torch.dtype) -> None:
    """Compare a small projection with the definition; raise SystemExit if it differs."""
    gradients = torch.randint(-8, 9, (5, 700), generator=torch.manual_seed(0)).to(device, dtype)
    spec = spec_of(kind, 700, proj_dim)
    expected = gradients.double().cpu().numpy() @ projection_matrix(spec)
    error = np.abs(project(gradients, spec).cpu().numpy() - expected).max()
    if not error <= (1e-5 if kind == "normal" else 0) * np.abs(expected).max():
        sys.exit(f"{kind} on {device} in {dtype} is wrong by {error:.3g}: not timed")


def in_turn(ours: Call, peer: Call, repeats: int, device: str) -> tuple[float, float]:
    """Return the median seconds of both calls, made in turn after one call each.

    Calls are repeated at least ``repeats`` times and for at least a second, because the times of
    short calls vary most.
    """
    seconds: tuple[list[float], list[float]] = [], []
    for i in count():
        if i > repeats and sum(map(sum, seconds)) > 1:
            break
        for call, times in zip((ours, peer), seconds, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if i:
                times.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


class Bench:
    """The settings that all rows share."""

    def __init__(self, device: str, threads: int, repeats: int):
        """Set the device, the threads of both sides, and the number of timed calls."""
        self.device, self.threads, self.repeats = device, threads, repeats
        torch.set_num_threads(threads)

    def gradients(self, n_samples: int, n_params: int, dtype: torch.dtype) -> torch.Tensor:
        """Return normal numbers."""
        return torch.randn(n_samples, n_params, device=self.device).to(dtype)

    def row(
        self,
        kind: str,
        gradients: torch.Tensor,
        proj_dim: int,
        peer: str,
        call: Call,
        target: float | None,
        ours: Call | None = None,
    ) -> Row:
        """Time ``project`` against a peer."""
        n_samples, n_params = gradients.shape
        check(kind, proj_dim, self.device, gradients.dtype)
        spec = spec_of(kind, n_params, proj_dim)
        ours = ours or (lambda: project(gradients, spec, threads=self.threads))
        seconds, peer_seconds = in_turn(ours, call, self.repeats, self.device)
        return Row(
            kind,
            peer,
            str(gradients.dtype).removeprefix("torch."),
            n_samples,
            n_params,
            proj_dim,
            self.threads,
            seconds,
            peer_seconds,
            peer_seconds / seconds,
            target,
        )

    def against_basic_projector(self, kind: str) -> Iterator[Row]:
        """Compare with TRAK's projector that needs no CUDA extension."""
        try:
            from trak.projectors import BasicProjector, ProjectionType  # pyright: ignore[reportMissingImports]
        except ImportError:
            print("BasicProjector: not measured, `pip install traker` first", file=sys.stderr)
            return
        for n_samples in (8, 32):
            for proj_dim in (512, 2048, 4096):
                rows = self.gradients(n_samples, 2**16, torch.float32)
                peer = BasicProjector(
                    2**16, proj_dim, 0, ProjectionType(kind), torch.device(self.device)
                )
                if kind == "normal":
                    target = 2
                else:
                    target = 100 if n_samples == 8 and proj_dim >= 2048 else 30
                yield self.row(
                    kind,
                    rows,
                    proj_dim,
                    "BasicProjector",
                    lambda p=peer, r=rows: p.project(r, model_id=0),
                    target,
                )

    def against_matmul(self, dtype: torch.dtype) -> Iterator[Row]:
        """Compare with torch's multiplication by a matrix that is already in memory."""
        for proj_dim in (512, 4096):
            n_params = 2**16 if self.device == "cpu" else 2**20
            matrix = self.gradients(n_params, proj_dim, dtype)
            for n_samples in (1, 2, 8, 32, 64, 100):
                rows = self.gradients(n_samples, n_params, dtype)
                if self.device == "cpu":
                    target = 1 if (n_samples, proj_dim) == (100, 512) else 2
                else:
                    target = 4 if n_samples <= 32 and proj_dim == 4096 else None
                yield self.row(
                    "rademacher",
                    rows,
                    proj_dim,
                    "matmul, matrix in memory",
                    lambda r=rows, m=matrix: r @ m,
                    target,
                )

    def against_dense(self) -> Iterator[Row]:
        """Compare the structured kinds with our dense kernel."""
        for kind, target in (("hadamard", 20), ("normal", None)):
            for n_samples in (8, 32):
                rows = self.gradients(n_samples, 2**18, torch.float32)
                dense = spec_of("rademacher", 2**18, 4096)
                yield self.row(
                    kind,
                    rows,
                    4096,
                    "our rademacher",
                    lambda r=rows, s=dense: project(r, s, threads=self.threads),
                    target,
                )

    def against_one_thread(self) -> Iterator[Row]:
        """Compare two threads with one."""
        for kind in ("rademacher", "normal", "hadamard"):
            rows = self.gradients(8, 2**20, torch.float32)
            spec = spec_of(kind, 2**20, 2048)
            yield self.row(
                kind,
                rows,
                2048,
                "our 1 thread",
                lambda r=rows, s=spec: project(r, s, threads=1),
                1.8,
                ours=lambda r=rows, s=spec: project(r, s, threads=2),
            )

    def against_float32(self) -> Iterator[Row]:
        """Compare 16-bit gradients with float32."""
        for dtype in (torch.float16, torch.bfloat16):
            rows = self.gradients(32, 2**20, dtype)
            spec = spec_of("rademacher", 2**20, 2048)
            wide = rows.float()
            yield self.row(
                "rademacher",
                rows,
                2048,
                "our float32",
                lambda r=wide, s=spec: project(r, s, threads=self.threads),
                None,
            )

    def against_fast_jl(self) -> Iterator[Row]:
        """Compare with fast_jl, TRAK's CUDA extension."""
        try:
            import fast_jl  # pyright: ignore[reportMissingImports]
        except ImportError:
            print("fast_jl: not measured, it cannot be imported", file=sys.stderr)
            return
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        for n_samples, peer, target in (
            (8, fast_jl.project_rademacher_8, 2.0),
            (32, fast_jl.project_rademacher_32, 1.7),
            (64, fast_jl.project_rademacher_32, 1.7),
        ):
            for proj_dim in (512, 4096):
                rows = self.gradients(n_samples, 10**7, torch.float16)
                yield self.row(
                    "rademacher",
                    rows,
                    proj_dim,
                    "fast_jl",
                    lambda f=peer, r=rows, k=proj_dim: f(r, k, 0, multiprocessors),
                    target,
                )

    def against_ceilings(self) -> Iterator[Row]:
        """Compare with the GPU's limits; a ratio of 0.5 means half of the limit's rate."""
        size = 8192
        square = self.gradients(size, size, torch.float16)
        peak, _ = in_turn(lambda: square @ square, lambda: None, self.repeats, self.device)
        per_second = 2 * size**3 / peak
        for n_samples in (32, 64, 128):
            rows = self.gradients(n_samples, 10**7, torch.float16)
            row = self.row("rademacher", rows, 4096, "peak of fp16 matmul", lambda: None, 0.5)
            ceiling = 2 * rows.numel() * 4096 / per_second
            yield _with_ceiling(row, ceiling)
        rows = self.gradients(32, 10**7, torch.float32)
        row = self.row("hadamard", rows, 4096, "copy", lambda: rows.clone(), 0.6)
        yield _with_ceiling(row, row.peer_seconds / 2)  # a copy reads and writes


def _with_ceiling(row: Row, seconds: float) -> Row:
    return replace(row, peer_seconds=seconds, ratio=seconds / row.seconds)


def memory_row(threads: int) -> str:
    """Measure the additional memory of a projection of 32 gradients from 10^7 to 4,096 numbers.

    This must run first, because the system records the peak of the whole process.
    """
    rows = np.zeros((32, 10**7), np.float32)
    out = np.zeros((32, 4096), np.float32)
    spec = spec_of("rademacher", 10**7, 4096)
    project(rows[:, :50], spec, out=out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    project(rows, spec, out=out, threads=threads)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    return f"memory beyond gradients and result: {grown:.1f} MiB at 32 x 10^7 to 4,096 (bound 64)"


def markdown(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| kind | against | dtype | B | G | k | threads | ours, ms | peer, ms | ratio | target |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        missed = " (missed)" if row.target is not None and row.ratio < row.target else ""
        lines.append(
            f"| {row.kind} | {row.peer} | {row.dtype} | {row.n_samples} | {row.n_params:,} | "
            f"{row.proj_dim:,} | {row.threads} | {row.seconds * 1e3:,.2f} | "
            f"{row.peer_seconds * 1e3:,.2f} | {row.ratio:,.2f} | {target}{missed} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of both sides, on a CPU")
    parser.add_argument("--repeats", type=int, default=5, help="of each call, at least")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.device, arguments.threads, arguments.repeats)
    if arguments.device == "cpu":
        parts = [
            bench.against_matmul(torch.float32),
            bench.against_basic_projector("rademacher"),
            bench.against_basic_projector("normal"),
            bench.against_dense(),
            bench.against_float32(),
            bench.against_one_thread(),
        ]
    else:
        parts = [
            bench.against_fast_jl(),
            bench.against_matmul(torch.float16),
            bench.against_ceilings(),
            bench.against_dense(),
            bench.against_float32(),
        ]
    about = environment(arguments.device, ("numba", "numba-cuda", "torch", "numpy", "traker"))
    print(", ".join(f"{key} {value}" for key, value in about.items()), "\n", flush=True)
    memory = memory_row(arguments.threads) if arguments.device == "cpu" else ""
    rows = []
    for row in (row for part in parts for row in part):
        rows.append(row)
        print(f"{row.kind} / {row.peer}: {row.ratio:.2f}", file=sys.stderr, flush=True)
    print(markdown(rows))
    print("\n" + memory)
    if arguments.csv:
        write_csv(arguments.csv, rows, about)


if __name__ == "__main__":
    main()

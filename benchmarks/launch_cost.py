"""Measure the host time of a kernel launch, and of a projection call with little arithmetic.

    python benchmarks/launch_cost.py

With a GPU, the script measures launches by CUDA's driver and by numba's dispatcher in turn, and
calls of `project_cuda`, without waiting for the results. Without a GPU, the driver's functions do
nothing and tensors are on the CPU, so allocations and copies take the time of a CPU, and numba's
dispatcher is not measured. The script prints the medians of 2,000 launches and of 500 calls in
microseconds.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from shared import environment

from trak_core.projection.cuda import compiled, project, project_slices
from trak_core.settings import ProjectionKind, ProjectionSpec

CAPABILITY = (9, 0)  # assumed where there is no GPU
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def without_a_gpu() -> None:
    """Replace the driver and torch's device queries, which need a GPU."""
    stream: Any = SimpleNamespace(device_index=0, cuda_stream=0)
    driver = SimpleNamespace(cuLaunchKernel=lambda *_: (0,))
    for owner, name, value in (
        (compiled, "_driver", lambda: driver),
        (compiled, "_function", lambda *_: None),
        (project, "capability_of", lambda _: CAPABILITY),
        (project, "require_right_matrix", lambda *_: None),
        (project, "_on", lambda _: nullcontext()),
        (torch.cuda, "current_stream", lambda: stream),
    ):
        setattr(owner, name, value)


def median_us(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of single calls, after some calls to warm up."""
    seconds = []
    for i in range(repeats + 20):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
        if i % 100 == 0 and HAS_GPU:
            torch.cuda.synchronize()  # otherwise the launch queue fills up, and launches wait
    return statistics.median(seconds[20:]) * 1e6


def main() -> None:
    """Time launches and calls of every kernel."""
    if not HAS_GPU:
        without_a_gpu()
    print(environment(DEVICE.type, ["torch", "numba", "numba-cuda", "cuda-bindings"]))
    print("| kernel | launch, us | by numba, us | call, us |\n|---|---|---|---|")
    for kind, rows in (("rademacher", 8), ("normal", 8), ("hadamard", 4)):
        spec = ProjectionSpec(
            kind=ProjectionKind(kind), n_params=10**6, proj_dim=64, seed=3, stream=9
        )
        gradients = torch.zeros((rows, 1024), dtype=torch.float16, device=DEVICE)
        out = torch.zeros((rows, 64), device=DEVICE)
        project.project_cuda([gradients], spec, 0, out)
        variant = project.choose(spec, gradients.dtype, DEVICE).variant(rows)
        types = "float16[:]", *project_slices.TYPES
        sizes = 1024, 0, 0, 1024, rows, 0, project_slices.SLICE, 64
        given = gradients.view(-1), sizes, out.view(-1), project_slices.round_keys(3), 9
        grid = variant.grid[0], 1, variant.grid[1]

        def launch(given: Any = (variant.kernel, types, grid, variant.n_threads, *given)) -> None:
            compiled.launch(*given)

        by_numba = "-"
        if HAS_GPU:
            from numba import cuda

            kernel: Any = compiled.definition(variant.kernel)
            stream: Any = cuda
            stream = stream.external_stream(torch.cuda.current_stream().cuda_stream)
            started = kernel[grid, variant.n_threads, stream]
            by_numba = f"{median_us(lambda s=started, g=given: s(*g), 500):.1f}"
        call = median_us(lambda g=gradients, s=spec, o=out: project.project_cuda([g], s, 0, o), 500)
        print(f"| {kind} | {median_us(launch, 2000):.1f} | {by_numba} | {call:.0f} |")


if __name__ == "__main__":
    main()

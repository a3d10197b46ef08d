"""Functions for benchmarks: the machine, methods that alternate ("sides"), a floor, memory.

The floor is an ordinary forward and backward pass of the same batch. Times are CPU seconds, or on
GPUs wall seconds. Ratios are relative to the floor's median. Memory is the peak minus the memory
before the model is loaded, which the same script measures with ``--peak SIDE`` in a separate
process for each side. On a GPU it is the memory that torch allocates there. This module imports
only torch, because the environments of other packages lack this project's dependencies.
"""

import ctypes
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    return {package: installed[package] for package in packages if package in installed}


def environment(device: str, packages: Iterable[str]) -> dict[str, str]:
    """Return the device's name, the versions of Python and the packages, and the commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    python = platform.python_version()
    return {"device": name, "python": python, **_versions(packages), "commit": commit}


def write_csv(path: Path, rows: Sequence[Any], about: dict[str, str]) -> None:
    """Write rows, which are dataclasses, with the additional columns ``about``."""
    import pandas as pd

    pd.DataFrame(rows).assign(**about).to_csv(path, index=False)


FLOOR = "floor"


def floor(model: nn.Module, output: Any, batch: Any) -> None:
    """Run an ordinary forward and backward pass."""
    model.zero_grad(set_to_none=True)
    outputs = output.read(batch.given_to(model))
    torch.vmap(output.value)(outputs, batch.labels).sum().backward()
    model.zero_grad(set_to_none=True)


def seconds_of(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    *,
    by_clock: bool = False,
) -> dict[str, list[float]]:
    """Return the times of each side over the rounds; in a round, all sides run in turn."""
    clock = time.perf_counter if by_clock or device == "cuda" else time.process_time
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, call in sides.items():
            wait()
            start = clock()
            call()
            wait()
            seconds[side].append(clock() - start)
    return {side: taken[1:] for side, taken in seconds.items()}


def _peak_kib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def print_peak(call: Callable[[], object]) -> None:
    """Print the KiB that a call adds at its peak, for a process that reads them."""
    ctypes.CDLL(None).malloc_trim(0)  # what setting up freed
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # and the peak so far
    before = _peak_kib()
    call()
    print("peak", _peak_kib() - before)


def peak_on_gpu(call: Callable[[], object]) -> int:
    """Return the bytes that a call adds to torch's allocated GPU memory at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before

"""Functions for benchmarks: the machine, methods that alternate ("sides"), a floor, memory.

The floor is an ordinary forward and backward pass of the same batch. Times are CPU seconds, or on
GPUs wall seconds. Ratios are relative to the floor's median. Memory is the peak minus the memory
before the model is loaded, which the same script measures with ``--peak SIDE`` in a separate
process for each side. On a GPU it is the memory that torch allocates there. This module imports
only torch, because the environments of other packages lack this project's dependencies.
"""

import ctypes
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
_PR_SET_CHILD_SUBREAPER = 36  # adopt processes whose parent has ended (prctl(2))
_LONGEST_SECONDS = 60  # for a fork server that outlives its parent


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


@dataclass(frozen=True)
class Usage:
    """CPU and wall seconds of a process and its children; MB and "own MB" of the largest."""

    seconds: float
    wall: float
    mb: float
    own_mb: float


def run(arguments: list[str], folder: Path, log: Path) -> Usage:
    """Run a program, write its output to the log, and return its time and memory."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(arguments, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
        pages, own = Path(f"/proc/{process.pid}/statm"), 0
        while True:
            _, resident, shared, *_ = map(int, (pages.read_text() or "0 0 0").split())
            own = max(own, resident - shared)
            time.sleep(0.01)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
    if status:
        raise SystemExit(f"{' '.join(arguments[:4])} failed:\n{log.read_text()[-3000:]}")
    wall = time.monotonic() - start
    used_by = [used, *_ended_later(time.monotonic() + _LONGEST_SECONDS)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used_by)
    largest = max(usage.ru_maxrss for usage in used_by)
    own_mb = own * os.sysconf("SC_PAGE_SIZE") / 1e6
    return Usage(seconds, wall, largest * 1024 / 1e6, own_mb)


def _ended_later(latest: float) -> Iterator[resource.struct_rusage]:
    """Yield the usage of processes that outlived their parent, until the last has ended."""
    while time.monotonic() < latest:
        try:
            ended, _, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended:
            yield used
        else:
            time.sleep(0.05)
    raise SystemExit("A process outlived its parent and did not end in time.")

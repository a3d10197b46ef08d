"""What a row of a benchmark belongs to: device, versions, commit."""

import csv
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
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


def seconds_now(device: str) -> float:
    """Return this process's CPU time, or for ``cuda`` the wall's once the GPU has no more to do."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def write_csv(path: Path, rows: Sequence[Any], about: dict[str, str]) -> None:
    """Write a table's rows, dataclasses, each with what it belongs to."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(rows[0]), *about])
        writer.writeheader()
        writer.writerows(asdict(row) | about for row in rows)

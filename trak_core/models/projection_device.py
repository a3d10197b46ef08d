"""Where a job projects, and with what; apart, since other jobs import no projection."""

import torch

from trak_core.models.device import find_device, takes_cuda


def projecting_device(name: str) -> torch.device:
    """Return the device that a config names, with all that projecting on it needs.

    Raises:
        InputError: If there is none, or if numba-cuda is missing.
    """
    if takes_cuda(name):
        # Only here: a machine without CUDA needs none. Better now than after a wait for a GPU.
        from trak_core.projection.cuda.machine import require_numba_cuda

        require_numba_cuda()
    return find_device(name)


def compilers(device: torch.device) -> tuple[str, ...]:
    """Return the packages that compile the projection's kernels, for an artifact's provenance."""
    return ("numba", "numba-cuda") if device.type == "cuda" else ("numba",)

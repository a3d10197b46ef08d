"""What stages that project gradients share: device, compilers, gradients as blocks."""

import torch
from torch import Tensor

from trak_core.gradients import PerSample
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


def gradient_blocks(result: PerSample) -> list[Tensor]:
    """Return the gradients of a batch where they are, one (batch, entries) block a parameter."""
    blocks = [b.reshape(len(b), -1) for b in result.gradients.values()]
    if len({block.dtype for block in blocks}) > 1 or blocks[0].dtype is torch.float64:
        blocks = [block.float() for block in blocks]
    return blocks

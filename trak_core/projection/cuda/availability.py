"""What this machine can run: numba-cuda, a driver, a GPU of a known compute capability."""

import importlib.util
from functools import cache

import torch
from numba import config

from trak_core.errors import InputError

LEAST_CAPABILITY = (7, 0)
INSTEAD = "Or project on the CPU."


def is_simulated() -> bool:
    """Return whether numba stands in for the GPU in Python (NUMBA_ENABLE_CUDASIM=1)."""
    return bool(config.ENABLE_CUDASIM)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def require_numba_cuda() -> None:
    """Raise an error that explains unless kernels can be compiled and started here.

    Raises:
        InputError: If numba-cuda is missing, or does not find the driver or its compiler.
    """
    if is_simulated():
        return
    # A numba without it has a CUDA target of its own, no longer maintained and never tried here.
    if importlib.util.find_spec("numba_cuda") is None:
        raise InputError(
            "Projecting on a GPU needs the package numba-cuda. Found it not installed. "
            f"Run `pip install 'trak-core[cuda]'`. {INSTEAD}",
            code="projection.no_numba_cuda",
        )
    from numba import cuda

    try:
        available = cuda.is_available()
        reason = "" if available else str(cuda.cuda_error() or "no GPU or no compiler")
    except Exception as error:  # whatever the search for libraries ends with
        available, reason = False, f"{type(error).__name__}: {error}"
    if not available:
        raise InputError(
            "Projecting on a GPU needs a CUDA driver, and a compiler that numba-cuda finds. "
            f"Found: {reason}. Check `nvidia-smi`, and install numba-cuda[cu13], or [cu12] for a "
            f"driver of CUDA 12, or set CUDA_HOME to a CUDA toolkit. {INSTEAD}",
            code="projection.no_cuda",
        )


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; the simulator stands for one without tensor cores.

    Raises:
        InputError: If kernels are simulated and the device is a GPU, or if the GPU is too old.
    """
    if is_simulated():
        if device.type == "cuda":
            raise InputError(
                "Projecting on a GPU needs its compiled kernels. Found numba's CUDA simulator "
                "switched on: unset NUMBA_ENABLE_CUDASIM.",
                code="projection.simulated",
            )
        return LEAST_CAPABILITY
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = ("{}.{}".format(*c) for c in (LEAST_CAPABILITY, capability))
        raise InputError(
            f"Projecting on a GPU needs compute capability {least} or later. Found {found} "
            f"({name_of(device)}). {INSTEAD}",
            code="projection.capability",
        )
    return capability


def name_of(device: torch.device) -> str:
    """Return what to call a device in a message."""
    return "numba's simulator" if is_simulated() else torch.cuda.get_device_name(device)

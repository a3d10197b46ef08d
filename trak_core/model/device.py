"""Where a job computes: what the config says, and one GPU for one process."""

import torch

from trak_core.errors import InputError
from trak_core.system.gpu_lock import hold_one


def takes_cuda(name: str) -> bool:
    """Return whether the device that a config names is CUDA; ``auto`` is where torch finds one.

    Raises:
        InputError: If ``cuda`` is asked for and there is none; no other device takes its place.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InputError(
            "compute.device is cuda, so torch must find a CUDA device. Found none: check "
            "`nvidia-smi` and that torch is a CUDA build, or set compute.device to cpu or auto."
        )
    return name == "cuda" or (name == "auto" and found)


def find_device(name: str) -> torch.device:
    """Return the device that a config names: ``auto``, ``cpu`` or ``cuda``.

    Of several GPUs the first is taken that no other job holds; if there is none, the job waits for
    one.

    Raises:
        InputError: See ``takes_cuda``.
    """
    if not takes_cuda(name):
        return torch.device("cpu")
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    device = torch.device("cuda", hold_one(tuple(str(gpu.uuid) for gpu in gpus)))
    torch.cuda.set_device(device)
    return device


def full_precision(device: torch.device) -> torch.device:
    """Return the device, and have this process compute with all digits of its numbers there."""
    if device.type == "cuda":
        # TF32, which torch allows convolutions there, has three digits: fewer than exact ones need.
        torch.backends.cudnn.allow_tf32 = False
    return device


def device_name(device: torch.device) -> str:
    """Return what an artifact's provenance says of a device."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"

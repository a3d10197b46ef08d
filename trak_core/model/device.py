"""Find the device that a config names, and take one GPU for this process."""

import torch

from trak_core.errors import InputError
from trak_core.system.gpu_lock import hold_one


def takes_cuda(name: str) -> bool:
    """Return whether the device that a config names is CUDA; ``auto`` is CUDA if torch finds it.

    Raises:
        InputError: If the config names ``cuda`` and there is none; no other device takes its place.
    """
    is_available = torch.cuda.is_available()
    if name == "cuda" and not is_available:
        raise InputError(
            "compute.device is cuda, so torch must find a CUDA device. Found none: check "
            "`nvidia-smi` and that torch is a CUDA build, or set compute.device to cpu or auto."
        )
    return name == "cuda" or (name == "auto" and is_available)


def find_device(name: str) -> torch.device:
    """Return the device that a config names: ``auto``, ``cpu`` or ``cuda``.

    A job takes the first GPU that no other job holds, and waits if all are held.

    Raises:
        InputError: If it names ``cuda`` and there is none.
    """
    if not takes_cuda(name):
        return torch.device("cpu")
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    device = torch.device("cuda", hold_one(tuple(str(gpu.uuid) for gpu in gpus)))
    torch.cuda.set_device(device)
    return device


def full_precision(device: torch.device) -> torch.device:
    """Return the device, and switch this process's convolutions there from TF32 to float32."""
    if device.type == "cuda":
        # TF32 has three digits, fewer than exact scores need.
        torch.backends.cudnn.allow_tf32 = False
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a device for an artifact's provenance."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"

"""Where a job computes: what the config says, and one GPU for one process."""

import os
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from trak_core.errors import InputError

_LOOK_SECONDS = 1.0


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


@cache
def hold_one(names: tuple[str, ...]) -> int:
    """Take a GPU for the rest of this process's life; wait while other processes hold all of them.

    Asked again, it gives the same one.

    A lock on a file in the system's temporary folder says that a GPU is taken. The system gives it
    up when the process ends in whatever way, so that a killed job blocks nobody.

    Args:
        names: What tells the GPUs of this machine apart for every process, such as UUIDs.

    Returns:
        Position in ``names``.
    """
    import fcntl  # Only here: Windows has none, and needs none without a GPU.

    folder = Path(tempfile.gettempdir())
    waiting = False
    while True:
        for position, name in enumerate(names):
            lock = folder / f"trak-{os.getuid()}-gpu-{name}.lock"
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return position  # The descriptor stays open, and the lock with it.
        if not waiting:
            print(f"Waiting: other jobs hold all GPUs ({len(names)}).", flush=True)
            waiting = True
        time.sleep(_LOOK_SECONDS)

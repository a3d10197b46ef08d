"""Find the device that a config names, and take one GPU for this process."""

import os
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from trak_core.errors import InputError

_LOOK_SECONDS = 1.0


def takes_cuda(name: str) -> bool:
    """Return whether the device that a config names is CUDA; ``auto`` is CUDA if torch finds it.

    No other device takes the place of a ``cuda`` that isn't there: that is an ``InputError``.
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


@cache
def hold_one(names: tuple[str, ...]) -> int:
    """Return the place in ``names`` of a GPU that this process holds from now on, always the same.

    It waits while other processes hold all.
    A lock on a file in the system's temporary folder says that a GPU is taken. The system gives it
    up when the process ends in whatever way, so that a killed job blocks nobody. The ``names``
    tell the GPUs of this machine apart for every process, such as UUIDs.

    Raises:
        InputError: If the folder's disk knows no locks (``model.gpu_locks``).
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
            except OSError as error:
                os.close(descriptor)
                raise InputError(
                    f"{folder}: the folder of temporary files must lie on a disk that knows locks, "
                    f"by which jobs share GPUs. Found {error.strerror}. Name a folder on a disk of "
                    "this machine: TMPDIR=/dev/shm before the command.",
                    code="model.gpu_locks",
                ) from error
            else:
                return position  # The descriptor stays open, and the lock with it.
        if not waiting:
            print(f"Waiting: other jobs hold all GPUs ({len(names)}).", flush=True)
            waiting = True
        time.sleep(_LOOK_SECONDS)

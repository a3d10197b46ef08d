"""Find the device that a config names, reserve a GPU, and set the precision of float32 products."""

import os
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trak_core.errors import InputError
from trak_core.runtime.progress import print_line

_LOOK_SECONDS = 1.0

# The parts of torch that have a setting ``fp32_precision`` for float32 products.
_backends: Any = torch.backends
_PRODUCTS: Sequence[Any] = (
    *(_backends.cuda.matmul, _backends.cudnn.conv, _backends.cudnn.rnn),
    *(_backends.mkldnn.matmul, _backends.mkldnn.conv, _backends.mkldnn.rnn),
)
# Maps the values of `compute.precision` in a config to values of torch's ``fp32_precision``.
PRECISIONS = {"highest": "ieee", "high": "tf32"}


@dataclass(frozen=True, slots=True)
class Compute:
    """The device and the limits of a computation. They affect results only through rounding.

    A batch has at most ``batch_size`` samples, and fewer if arrays would need more than
    ``memory_mb`` MiB. ``threads`` is the number of CPU threads for the projection.
    """

    device: torch.device
    batch_size: int
    memory_mb: int
    threads: int


def takes_cuda(name: str, *, projects: bool = False) -> bool:
    """Return whether the device ``name`` in a config stands for CUDA.

    The name ``auto`` stands for CUDA if a CUDA device is available.

    Raises:
        InputError: If the name is ``cuda`` and torch finds no CUDA device, or if ``projects`` is
            true and the package that projects on CUDA devices is missing.
    """
    is_available = torch.cuda.is_available()
    if name == "cuda" and not is_available:
        raise InputError(
            "With `compute.device: cuda`, torch must find a CUDA device. Found none. Check that "
            "`nvidia-smi` lists a GPU and that torch is a CUDA build, or set compute.device to cpu "
            "or auto.",
            code="attribution.no_cuda",
        )
    is_cuda = name == "cuda" or (name == "auto" and is_available)
    if is_cuda and projects:
        from trak_core.projection.cuda.project import require_numba_cuda  # CUDA only

        require_numba_cuda()
    return is_cuda


def usable_device(given: str | torch.device, *, projects: bool) -> torch.device:
    """Return the torch device for ``given``, or raise an error if it cannot be used."""
    if given == "auto":
        given = "cuda" if takes_cuda("auto") else "cpu"
    device = torch.device(given)
    takes_cuda(device.type, projects=projects)
    return device


def find_device(name: str, *, projects: bool = False) -> torch.device:
    """Return the device for the name ``auto``, ``cpu`` or ``cuda`` in a config.

    For CUDA, reserve the first GPU that no other job has reserved, or wait until a GPU is free.
    """
    if not takes_cuda(name, projects=projects):
        return torch.device("cpu")
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    device = torch.device("cuda", hold_one(tuple(str(gpu.uuid) for gpu in gpus)))
    torch.cuda.set_device(device)
    return device


@contextmanager
def float32_precision(precision: str) -> Generator[None, None, None]:
    """Set the precision of float32 products in the context, and restore torch's settings on exit.

    Autocast is switched off, except where the model switches it on. With ``highest``, matrix
    products and convolutions multiply float32 numbers, although torch's default for convolutions on
    CUDA is TF32. With ``high``, they multiply TF32 numbers on devices that support TF32.
    """
    before = [product.fp32_precision for product in _PRODUCTS]
    set_float32_precision(precision)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        _round_factors(before)


def set_float32_precision(precision: str) -> None:
    """Set the precision of float32 products (see ``float32_precision``) until it is set again."""
    _round_factors([PRECISIONS[precision]] * len(_PRODUCTS))


def _round_factors(dtypes: Sequence[str]) -> None:
    # torch's older settings are set, too, because torch raises an error if old and new ones differ.
    older = "medium" if dtypes[3] == "bf16" else "high"
    torch.set_float32_matmul_precision(older if dtypes[0] == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtypes[1] == "tf32"
    for product, dtype in zip(_PRODUCTS, dtypes, strict=True):
        product.fp32_precision = dtype


def device_name(device: torch.device) -> str:
    """Return a device's name, to store it in files that are computed on this device."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


@cache
def hold_one(names: tuple[str, ...]) -> int:
    """Reserve one of the GPUs in ``names`` until this process ends.

    If no GPU is free, the function waits. A GPU is reserved by a lock on a file in the system's
    temporary folder. The system releases the lock when the process ends, even if it is killed. All
    processes on this machine must use the same name, such as a UUID, for the same GPU.

    Returns:
        The index of the reserved GPU in ``names``.
    """
    import fcntl  # This module does not exist on Windows.

    folder = Path(tempfile.gettempdir())
    waiting = False
    while True:
        for index, name in enumerate(names):
            lock = folder / f"trak-{os.getuid()}-gpu-{name}.lock"
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            except OSError as error:
                os.close(descriptor)
                raise InputError(
                    f"{folder}: the folder for temporary files must be on a disk that supports "
                    "file locks, because jobs reserve GPUs with locks. Locking a file failed: "
                    f"{error.strerror}. Set another folder on this machine, for example by writing "
                    "TMPDIR=/dev/shm before the command.",
                    code="model.gpu_locks",
                ) from error
            else:
                return index  # The open descriptor keeps the lock.
        if not waiting:
            print_line(f"Waiting for a GPU, because other jobs use all GPUs ({len(names)}).")
            waiting = True
        time.sleep(_LOOK_SECONDS)

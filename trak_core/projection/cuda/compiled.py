"""Compile kernels once a machine, keep their machine code, and start it by CUDA's driver.

numba-cuda compiles a kernel when no process has needed it on a machine before: for one compute
capability, one set of argument types and one state of this folder's source. The machine code is
kept under ``XDG_CACHE_HOME``, so that later processes import neither numba.cuda nor a compiler.

A launch differs from numba's own in that nothing is looked up by the arguments' values: tensors are
handed over as addresses, and all arguments are written into one array of 8 bytes each, where the
driver reads them. Numba gives an array as seven arguments: two unused addresses, the number of
entries, their size, the address, and for one dimension its length and stride; and a tuple as its
elements. A number of 4 bytes is read from the lower half of its 8.
"""

import ctypes
import hashlib
import importlib
import os
import re
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import config
from torch import Tensor

from trak_core.projection.cuda.variants import Kernel

_MOST_ARGUMENTS = 64  # of all kernels, counted as above
_COMPILERS = (
    *("numba-cuda", "numba", "nvidia-nvvm", "nvidia-nvjitlink"),  # with CUDA 13, then with 12
    *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)


def is_simulated() -> bool:
    """Return whether numba stands in for the GPU in Python (NUMBA_ENABLE_CUDASIM=1)."""
    return bool(config.ENABLE_CUDASIM)  # pyright: ignore[reportAttributeAccessIssue]


def launch(
    kernel: Kernel, types: Sequence[str], grid: Sequence[int], n_threads: int, *arguments: Any
) -> None:
    """Start a kernel on PyTorch's current stream; tensors are handed over without a copy.

    Args:
        kernel: The kernel, which is compiled if this machine has not done so.
        types: Types of the arguments: ``int64``, ``uint32``, ``int64 x 8`` for a tuple of 8, and
            ``float32[:]`` for a tensor of one dimension without gaps.
        grid: Blocks of threads in up to three dimensions.
        n_threads: Threads of a block.
        arguments: Tensors, integers, and tuples of integers.
    """
    if is_simulated():
        arrays = map(_simulated, types, arguments)
        definition(kernel)[tuple(grid), n_threads](*arrays)
        return
    stream = torch.cuda.current_stream()
    function = _function(kernel, tuple(types), stream.device_index)
    x, y, z = (*grid, 1, 1)[:3]
    address = _SLOTS.fill(words_of(arguments))
    given = x, y, z, n_threads, 1, 1, 0, stream.cuda_stream, address, 0
    _check(_driver().cuLaunchKernel(function, *given), "cuLaunchKernel")


def _simulated(name: str, argument: Any) -> Any:
    """Return an argument as the simulator takes it, where arithmetic of uint32 needs NumPy's."""
    if isinstance(argument, Tensor):
        return argument.numpy()
    if name.startswith("uint32"):
        is_tuple = isinstance(argument, tuple)
        return tuple(map(np.uint32, argument)) if is_tuple else np.uint32(argument)
    return argument


def definition(kernel: Kernel) -> Any:
    """Return a kernel as numba compiles or simulates it."""
    module, _, name = kernel.factory.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*kernel.arguments)


def words_of(arguments: Iterable[Any]) -> list[int]:
    """Return the 8 bytes of each of the driver's arguments, as integers."""
    words: list[int] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            n, size = argument.numel(), argument.element_size()
            words += (0, 0, n, size, argument.data_ptr(), n, size)
        elif isinstance(argument, tuple):
            words += argument
        else:
            words.append(argument)
    return words


class _Slots(threading.local):
    """Memory of a thread for the arguments of a launch, and their addresses."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * _MOST_ARGUMENTS)()
        first = ctypes.addressof(self.words)
        self.addresses = (ctypes.c_void_p * _MOST_ARGUMENTS)(
            *range(first, first + 8 * _MOST_ARGUMENTS, 8)
        )

        self.address = ctypes.addressof(self.addresses)

    def fill(self, words: Sequence[int]) -> int:
        """Write the arguments and return where their addresses lie."""
        struct.pack_into(f"{len(words)}q", self.words, 0, *words)
        return self.address


_SLOTS = _Slots()


@cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _check(result: tuple[Any, ...], name: str) -> Any:
    """Return what a call of the driver returned beside its status, which must say success."""
    status, *values = result
    if status:
        raise RuntimeError(f"{name} returned {status.name}")
    return values[0] if values else None


@cache
def _function(kernel: Kernel, types: tuple[str, ...], device: int) -> Any:
    """Return a kernel that is loaded on a device, ready to be started."""
    capability = torch.cuda.get_device_capability(device)
    code = machine_code(kernel, types, capability)
    driver = _driver()
    # The kernel is the only function of its module.
    (name,) = set(re.findall(rb"\0\.text\.([\w$]+)\0", code))
    module = _check(driver.cuModuleLoadData(code), "cuModuleLoadData")
    return _check(driver.cuModuleGetFunction(module, name), "cuModuleGetFunction")


def driver_version() -> int:
    """Return the driver's version of CUDA, such as 13000."""
    return _check(_driver().cuDriverGetVersion(), "cuDriverGetVersion")


def make_current(device: torch.device) -> None:
    """Make torch's context of a device that of the thread, where nothing has before."""
    driver = _driver()
    if not int(_check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        torch.cuda.current_stream(device).synchronize()


def machine_code(kernel: Kernel, types: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """Return a kernel's code for a compute capability, compiled now or by an earlier process."""
    path = kept_path(".cubin", kernel, types, capability)
    code = kept(path)
    if code is None:
        code = compile_kernel(kernel, types, capability)
        keep(path, code)
    return code


def kept_path(suffix: str, *decided_by: Any) -> Path:
    """Return where what is decided by these values, and by this folder's source, is kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # nobody's; nothing is kept then
            base = os.devnull
    text = "\n".join(map(repr, decided_by)).encode()
    return Path(base, "trak_core", hashlib.sha256(_source() + text).hexdigest()[:32] + suffix)


def kept(path: Path) -> bytes | None:
    """Return what ``keep`` has written; None if it isn't there, cannot be read or is damaged."""
    with suppress(OSError):
        digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
        if hashlib.sha256(content).digest() == digest:
            return content
    return None


def keep(path: Path, content: bytes) -> None:
    """Write a file with its SHA-256; if it can't be, the next process works again."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(hashlib.sha256(content).digest() + content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@cache
def _source() -> bytes:
    """Return the digest of what decides the code of a kernel: this folder, and the compilers."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for name in _COMPILERS:
        with suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)}".encode())
    return digest.digest()


def compile_kernel(kernel: Kernel, types: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """Compile a kernel for a compute capability by numba-cuda; no GPU is needed to."""
    cuda: Any = importlib.import_module("numba.cuda")
    dispatcher = definition(kernel)
    code, _ = cuda.compile(
        dispatcher.py_func,
        tuple(map(_numba_type, types)),
        device=False,
        abi="numba",
        output="ltoir",
        cc=capability,
        launch_bounds=dispatcher.targetoptions["launch_bounds"],
    )
    return _linked(code, capability)


def _numba_type(name: str) -> Any:
    types: Any = importlib.import_module("numba.cuda").types
    element, _, count = name.partition(" x ")
    if count:
        return types.UniTuple(getattr(types, element), int(count))
    if element.endswith("[:]"):
        return types.Array(getattr(types, element[:-3]), 1, "C")
    return getattr(types, element)


def _linked(code: bytes, capability: tuple[int, int]) -> bytes:
    """Return machine code, optimised as it is linked."""
    nvjitlink: Any = importlib.import_module("cuda.bindings.nvjitlink")
    options = ["-lto", "-arch=sm_{}{}".format(*capability)]
    handle = nvjitlink.create(len(options), options)
    try:
        kind = nvjitlink.InputType.LTOIR
        nvjitlink.add_data(handle, kind, code, len(code), "kernel")
        nvjitlink.complete(handle)
        linked = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise RuntimeError(log.decode(errors="replace").strip("\0\n")) from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(linked)

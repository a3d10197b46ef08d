"""Compile kernels, cache their machine code on disk, and launch it with CUDA's driver.

numba-cuda compiles a kernel for one compute capability, one set of argument types, and one version
of this folder's source. The machine code is cached under ``XDG_CACHE_HOME``, so later processes
import neither numba.cuda nor a compiler.

The driver reads the arguments of a launch from an array, with 8 bytes for each argument. A 4-byte
number is in the lower half of these 8 bytes. In numba's calling convention, a one-dimensional array
is passed as seven arguments: two unused addresses, the number of entries, the size of an entry, the
address, the length and the stride. A tuple is passed as one argument for each element. Launches by
numba itself are not used, because numba takes time to inspect the types of all arguments.
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

from trak_core.errors import InputError
from trak_core.projection.cuda.variants import Kernel
from trak_core.runtime.files import atomic_write

# Largest number of arguments of a kernel. An array counts as seven, and a tuple as its length.
_MOST_ARGUMENTS = 64
_COMPILERS = (
    *("numba-cuda", "numba", "nvidia-nvvm", "nvidia-nvjitlink"),  # CUDA 13
    *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),  # CUDA 12
)


def is_simulated() -> bool:
    """Return whether numba simulates the GPU in Python (NUMBA_ENABLE_CUDASIM=1)."""
    return bool(config.ENABLE_CUDASIM)  # pyright: ignore[reportAttributeAccessIssue]


def launch(
    kernel: Kernel, types: Sequence[str], grid: Sequence[int], n_threads: int, *arguments: Any
) -> None:
    """Launch a kernel on PyTorch's current stream, without copying tensors.

    The kernel is compiled if its machine code is not cached. ``grid`` is the number of thread
    blocks in up to three dimensions, and ``n_threads`` is the number of threads in a block. The
    arguments are tensors, integers, and tuples of integers. Examples of ``types`` are ``int64``,
    ``uint32``, ``int64 x 8`` for a tuple of 8 numbers, and ``float32[:]`` for a contiguous
    one-dimensional tensor.
    """
    if is_simulated():
        definition(kernel)[tuple(grid), n_threads](*map(_simulated, types, arguments))
        return
    stream = torch.cuda.current_stream()
    function = _function(kernel, tuple(types), stream.device_index)
    blocks_and_threads = *(*grid, 1, 1)[:3], n_threads, 1, 1
    address = _SLOTS.fill(words_of(arguments))
    queue = 0, stream.cuda_stream, address, 0  # The first 0 means no dynamic shared memory.
    _check(_driver().cuLaunchKernel(function, *blocks_and_threads, *queue), "cuLaunchKernel")


def _simulated(type_name: str, argument: Any) -> Any:
    """Return an argument in the form that numba's simulator needs, an array for a tensor."""
    if isinstance(argument, Tensor):
        return argument.numpy()
    if not type_name.startswith("uint32"):
        return argument
    is_tuple = isinstance(argument, tuple)
    return tuple(map(np.uint32, argument)) if is_tuple else np.uint32(argument)


def definition(kernel: Kernel) -> Any:
    module, _, name = kernel.factory.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*kernel.arguments)


def words_of(arguments: Iterable[Any]) -> list[int]:
    """Return the arguments of a launch as 8-byte integers, of which a tensor needs seven."""
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
    """The memory from which the driver reads the arguments of a launch. Each thread has its own."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * _MOST_ARGUMENTS)()
        first = ctypes.addressof(self.words)
        addresses = range(first, first + 8 * _MOST_ARGUMENTS, 8)
        self.addresses = (ctypes.c_void_p * _MOST_ARGUMENTS)(*addresses)

    def fill(self, words: Sequence[int]) -> int:
        """Store the arguments. Return the address of the array that contains their addresses."""
        struct.pack_into(f"{len(words)}q", self.words, 0, *words)
        return ctypes.addressof(self.addresses)


_SLOTS = _Slots()


@cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _check(result: tuple[Any, ...], name: str) -> Any:
    """Return the first result of a driver call, or raise an error if the call failed."""
    status, *values = result
    if status:
        raise RuntimeError(f"{name} returned {status.name}")
    return values[0] if values else None


@cache
def _function(kernel: Kernel, types: tuple[str, ...], device: int) -> Any:
    code = machine_code(kernel, types, torch.cuda.get_device_capability(device))
    driver = _driver()
    # The kernel is the only function in its module.
    (name,) = set(re.findall(rb"\0\.text\.([\w$]+)\0", code))
    module = _check(driver.cuModuleLoadData(code), "cuModuleLoadData")
    return _check(driver.cuModuleGetFunction(module, name), "cuModuleGetFunction")


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, such as 13000 for 13.0."""
    return _check(_driver().cuDriverGetVersion(), "cuDriverGetVersion")


def make_current(device: torch.device) -> None:
    """Make torch's CUDA context current in this thread, unless it already has a context.

    The driver's functions need a current context.
    """
    driver = _driver()
    if not int(_check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        torch.cuda.current_stream(device).synchronize()


def machine_code(kernel: Kernel, types: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """Return the machine code of a kernel. Compile the kernel if its code is not cached."""
    path = cache_path(".cubin", kernel, types, capability)
    code = read_cached(path)
    if code is None:
        code = compile_kernel(kernel, types, capability)
        write_cached(path, code)
    return code


def cache_path(suffix: str, *key: Any) -> Path:
    """Return the path of the file in the cache that has the given ``key`` and ``suffix``.

    The path also depends on the source of this folder, so changed code does not use old files.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        base = os.devnull  # If the user has no home folder, nothing is cached.
        with suppress(RuntimeError):
            base = Path.home() / ".cache"
    text = "\n".join(map(repr, key)).encode()
    return Path(base, "trak_core", hashlib.sha256(_source() + text).hexdigest()[:32] + suffix)


def read_cached(path: Path) -> bytes | None:
    """Return the content that ``write_cached`` wrote. If it is missing or damaged, return None."""
    with suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    return None


def write_cached(path: Path, content: bytes) -> None:
    """Write content to a cached file, after its SHA-256. If this fails, raise no error."""
    with suppress(OSError, InputError), atomic_write(path) as partial:
        partial.write_bytes(hashlib.sha256(content).digest() + content)


@cache
def _source() -> bytes:
    """Return a hash of this folder's source and of the compilers' versions."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for name in _COMPILERS:
        with suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)}".encode())
    return digest.digest()


def compile_kernel(kernel: Kernel, types: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    """Return the machine code of a kernel for a compute capability. This needs no GPU."""
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
    """Return the machine code that CUDA's linker makes from LTO-IR, the compiler's output."""
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

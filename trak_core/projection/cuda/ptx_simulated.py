"""The functions of ``ptx.py`` in Python, for numba's simulator.

Registers are laid out over a warp's threads as the PTX manual says. A thread's asynchronous copies
happen when it waits for them, not before, so that a kernel that reads too early reads garbage here
too. What this cannot show is a mistake shared with the manual's reading, and races within a warp.
"""

import ctypes
from collections.abc import Callable
from threading import Barrier, current_thread
from typing import Any

import numpy as np

_LANES = 32
_SECONDS = 120.0  # a warp whose threads part ways ends in an error, not in a hang


class _Warp:
    """Lets 32 simulated threads do one thing together."""

    def __init__(self) -> None:
        """Start with nothing deposited."""
        self._barrier = Barrier(_LANES, self._act)
        self._deposits: list[Any] = [None] * _LANES
        self._function: Callable[[list[Any]], list[Any]] = list
        self._results: list[Any] = []

    def _act(self) -> None:
        self._results = self._function(self._deposits)

    def together(self, lane: int, function: Callable[[list[Any]], list[Any]], value: Any) -> Any:
        """Return this lane's part of ``function`` of all lanes' values."""
        self._deposits[lane] = value
        self._function = function
        self._barrier.wait(_SECONDS)
        return self._results[lane]


def _thread() -> Any:
    """Return the simulator's thread, which knows more than Python's."""
    return current_thread()


def _together(function: Callable[[list[Any]], list[Any]], value: Any) -> Any:
    """Deposit this thread's value; return its part of ``function`` of the whole warp's."""
    thread = _thread()
    number = thread.threadIdx.x
    # The simulator makes one manager for each block of threads.
    warp = thread._manager.__dict__.setdefault(f"warp{number // _LANES}", _Warp())
    return warp.together(number % _LANES, function, value)


def _halves(words: np.ndarray, bfloat16: bool) -> np.ndarray:
    """Return the two 16-bit numbers of each word, lower half first, as a last axis."""
    bits = np.ascontiguousarray(words, np.uint32)[..., None].view(np.uint16)
    if bfloat16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _matrix_product(bfloat16: bool) -> Callable[..., Any]:
    def product(deposits: list[Any]) -> list[Any]:
        words = np.array([deposit[:6] for deposit in deposits], np.uint32).reshape(8, 4, 6)
        halves = _halves(words, bfloat16)  # (group, thread in group, register, half)
        a, b = np.empty((16, 16), np.float32), np.empty((16, 8), np.float32)
        a[:8, :8] = halves[:, :, 0].reshape(8, 8)
        a[8:, :8] = halves[:, :, 1].reshape(8, 8)
        a[:8, 8:] = halves[:, :, 2].reshape(8, 8)
        a[8:, 8:] = halves[:, :, 3].reshape(8, 8)
        b[:8] = halves[:, :, 4].reshape(8, 8).T
        b[8:] = halves[:, :, 5].reshape(8, 8).T
        c = np.array([deposit[6:] for deposit in deposits], np.float32).reshape(8, 4, 2, 2)
        d = c + (a @ b).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3)
        return [tuple(lane) for lane in d.reshape(_LANES, 4)]

    def mma(*registers):
        return _together(product, registers)

    return mma


mma_float16 = _matrix_product(bfloat16=False)
mma_bfloat16 = _matrix_product(bfloat16=True)


def and_xor(a, mask, b):
    """Return (a & mask) ^ b."""
    return np.uint32((a & mask) ^ b)


def anew(word):
    """Return the word."""
    return word


def shared_address(array):
    """Return the address of the block's one shared array: 0."""
    _thread()._manager.shared = array.view(np.uint8)
    return np.uint32(0)


def global_address(array):
    """Return where an array starts."""
    return np.uint64(array.ctypes.data)


def copy_async(destination, source, n_bytes):
    """Begin to copy 16 bytes, those past ``n_bytes`` as zeros."""
    if destination % 16 or source % 16:
        raise ValueError("An asynchronous copy needs addresses that are multiples of 16 bytes.")
    thread = _thread()
    if not hasattr(thread, "copies"):
        thread.copies = []
    thread.copies.append((int(destination), int(source), int(n_bytes)))


def wait_for_copies():
    """Do the copies this thread began."""
    thread = _thread()
    for destination, source, n_bytes in getattr(thread, "copies", []):
        content = ctypes.string_at(source, n_bytes).ljust(16, b"\0")
        thread._manager.shared[destination : destination + 16] = np.frombuffer(content, np.uint8)
    thread.copies = []


def load_matrices(address):
    """Return one register of each of four 8 x 8 matrices of 16-bit numbers."""
    shared = _thread()._manager.shared

    def load(addresses: list[Any]) -> list[Any]:
        rows = np.stack([shared[a : a + 16].copy().view(np.uint32) for a in addresses])
        return [tuple(lane) for lane in rows.reshape(4, _LANES).T]

    if address % 16:
        raise ValueError("A matrix row must start at a multiple of 16 bytes.")
    return _together(load, int(address))

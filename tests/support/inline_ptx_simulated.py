"""The functions of ``cuda/inline_ptx.py`` in Python, for the simulator.

Registers are laid out over a warp's threads as the PTX manual says. A thread's asynchronous copies
happen when it waits for them, not before, so that a kernel that reads too early reads garbage here
too. What this cannot show is a mistake shared with the manual's reading, and races within a warp.
"""

import ctypes

import numpy as np
from greenlet import getcurrent

LANES = 32


def together(function, value):
    """Return this thread's part of ``function`` of the values of its warp's threads."""
    thread = getcurrent()
    warp, lane = divmod(thread.threadIdx.x, LANES)
    return thread.block.together(warp, lane, LANES, function, value)


def _halves(words, bfloat16):
    """Return the two 16-bit numbers of each word, lower half first, as a last axis."""
    bits = np.ascontiguousarray(words, np.uint32)[..., None].view(np.uint16)
    if bfloat16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _matrix_product(bfloat16):
    def product(deposits):
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
        return [tuple(lane) for lane in d.reshape(LANES, 4)]

    def mma(*registers):
        return together(product, registers)

    return mma


mma_float16 = _matrix_product(bfloat16=False)
mma_bfloat16 = _matrix_product(bfloat16=True)


def and_xor(a, mask, b):
    """Return (a & mask) ^ b."""
    return np.uint32((a & mask) ^ b)


def opaque_copy(word):
    """Return the word."""
    return word


def shared_address(array):
    """Return the address of the block's one shared array: 0."""
    getcurrent()._manager.shared = array.view(np.uint8)
    return np.uint32(0)


def global_address(array):
    """Return where an array starts."""
    return np.uint64(array.ctypes.data)


def copy_async(destination, source, n_bytes):
    """Begin to copy 16 bytes, those past ``n_bytes`` as zeros."""
    assert destination % 16 == source % 16 == 0
    getcurrent().copies.append((int(destination), int(source), int(n_bytes)))


def wait_for_copies():
    """Do the copies this thread began."""
    thread = getcurrent()
    for destination, source, n_bytes in thread.copies:
        content = ctypes.string_at(source, n_bytes).ljust(16, b"\0")
        thread._manager.shared[destination : destination + 16] = np.frombuffer(content, np.uint8)
    thread.copies.clear()


def load_matrices(address):
    """Return one register of each of four 8 x 8 matrices of 16-bit numbers."""
    assert address % 16 == 0
    shared = getcurrent()._manager.shared

    def load(addresses):
        rows = np.stack([shared[a : a + 16].copy().view(np.uint32) for a in addresses])
        return [tuple(lane) for lane in rows.reshape(4, LANES).T]

    return together(load, int(address))

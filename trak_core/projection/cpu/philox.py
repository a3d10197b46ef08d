"""Philox4x32-10, a counter-based generator: its output is a pure function of (counter, key).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
from numba import njit

from trak_core.projection.cpu.compile import compiled

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF = np.uint64(32)


@njit(inline="always")
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return the four 32-bit words of one counter and key, all ``uint32``."""
    for _ in range(10):
        p0, p1 = _M0 * np.uint64(c0), _M1 * np.uint64(c2)
        c0, c2 = np.uint32(p1 >> _HALF) ^ c1 ^ k0, np.uint32(p0 >> _HALF) ^ c3 ^ k1
        c1, c3 = np.uint32(p1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@compiled
def fill_words(words, first_call, q, tag, key):
    """Write the words of the calls c0 = first_call, first_call + 1, ... at one q.

    Args:
        words: Length a multiple of 4, uint32; written.
        first_call: Unsigned 32 bit.
        q: Unsigned, below 2^56.
        tag: The kind's (``reference.py``).
        key: The low and the high half of the seed, and the stream, all uint32.
    """
    seed_low, seed_high, stream = key
    low, high = np.uint32(q & 0xFFFFFFFF), np.uint32((q >> 32) | (tag << 24))
    for i in range(len(words) // 4):
        call = np.uint32(first_call + i)
        w0, w1, w2, w3 = philox4x32(call, low, high, stream, seed_low, seed_high)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3

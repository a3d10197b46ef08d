"""Philox4x32-10, a counter-based generator: its output is a pure function of (counter, key).

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np
from numba import njit

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

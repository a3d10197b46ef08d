"""What all CPU kernels begin with: code compiled once for every later process, and random words.

Numba keeps compiled code on disk until the kernel's own file changes. It does not notice a change
in another module that the kernel took a function from, so here every state of the projection's
source has a folder of its own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit

from trak_core.provenance import code_digest

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF = np.uint64(32)


def _cache_folder() -> Path:
    base = os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).with_name("__pycache__")
    return Path(base, code_digest("trak_core.projection.cpu.project"))


_CACHE_FOLDER = _cache_folder()


def compiled(function: Callable[..., Any]) -> Any:
    """Decorate a function to be compiled at its first call; it releases the interpreter's lock.

    The code is kept in the folder that NUMBA_CACHE_DIR names, else beside this file, else, where
    that cannot be written, in the user's cache.

    Returns:
        Numba's dispatcher, called as the function is.
    """
    # A setting of Numba that it reads when it decorates.
    before = config.CACHE_DIR  # pyright: ignore[reportAttributeAccessIssue]
    config.CACHE_DIR = str(_CACHE_FOLDER)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before  # pyright: ignore[reportAttributeAccessIssue]


@njit(inline="always")
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return Philox4x32-10's four words of one counter and key, all ``uint32``.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
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

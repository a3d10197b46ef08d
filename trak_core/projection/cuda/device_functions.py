"""Functions that CUDA kernels call to compute random words, signs and normal entries of R.

``reference.py`` defines the results. In numba's simulator, the functions run as plain Python, so
that tests without a GPU can compare them bit for bit with the definition.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numba.cuda
import numpy as np

from trak_core.projection.cuda.compiled import is_simulated

cuda: Any = numba.cuda  # pyright cannot check the code of kernels
SIMULATED = is_simulated()

float32, int32, int64 = np.float32, np.int32, np.int64
uint16, uint32, uint64 = np.uint16, np.uint32, np.uint64

_M0, _M1 = uint64(0xD2511F53), uint64(0xCD9E8D57)
_HALF = uint64(32)
_LOW = uint64(0xFFFFFFFF)


def kernel(n_threads: int, n_blocks: int = 1) -> Callable[..., Any]:
    """Return the decorator for a kernel with at most ``n_threads`` threads in a block.

    The compiler limits the registers of a thread so that ``n_blocks`` blocks fit on a
    multiprocessor. The simulator ignores both numbers.
    """
    return cuda.jit if SIMULATED else cuda.jit(launch_bounds=(n_threads, n_blocks))


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that kernels can call. It is inlined, so that arrays stay in registers."""
    return function if SIMULATED else cuda.jit(device=True, forceinline=True)(function)


def unrolled(n: int) -> Callable[..., Any]:
    """Return the decorator that replaces a loop for i = 0, ..., n - 1 by n calls of its body.

    The body is a device function ``body(i, *arguments)``. The decorated function takes
    ``*arguments`` and makes all n calls. In each call, i is a constant, so that arrays that are
    indexed by i can stay in registers. Some versions of the compiler would not unroll a loop.
    """

    def decorate(body):
        if not SIMULATED:
            from trak_core.projection.cuda.inline_ptx import repeated

            return repeated(device_function(body), n)

        def loop(*arguments):
            for i in range(n):
                body(i, *arguments)

        return loop

    return decorate


@device_function
def _round(c0, c1, c2, c3, k0, k1):
    p0, p1 = uint64(_M0 * uint64(c0)), uint64(_M1 * uint64(c2))
    return (
        uint32(uint32(uint32(p1 >> _HALF) ^ c1) ^ k0),
        uint32(p1 & _LOW),
        uint32(uint32(uint32(p0 >> _HALF) ^ c3) ^ k1),
        uint32(p0 & _LOW),
    )


@device_function
def philox(c0, c1, c2, c3, keys):
    """Return the four random words, uint32, for a counter. ``keys`` are the keys of all rounds."""
    # The rounds are written out, because the compiler might not unroll a loop.
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[0], keys[1])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[2], keys[3])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[4], keys[5])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[6], keys[7])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[8], keys[9])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[10], keys[11])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[12], keys[13])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[14], keys[15])
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, keys[16], keys[17])
    return _round(c0, c1, c2, c3, keys[18], keys[19])


@device_function
def words_at(c0, q, tag, stream, keys):
    """Return the four random words that ``reference.py`` defines for ``c0``, ``q`` and ``tag``."""
    high = uint32(uint32(uint64(q) >> _HALF) | uint32(tag << 24))
    return philox(uint32(c0), uint32(uint64(q) & _LOW), high, stream, keys)


if SIMULATED:
    libdevice: Any = SimpleNamespace(
        int_as_float=lambda bits: bits.view(float32),
        float_as_int=lambda value: float32(value).view(int32),
        fmul_rn=lambda a, b: float32(a * b),
        fadd_rn=lambda a, b: float32(a + b),
    )
else:
    import numba.cuda.libdevice

    libdevice: Any = numba.cuda.libdevice

# These functions prevent the compiler from fusing a * b + c into one operation. That would round
# only once, so entries of R would differ from the definition in ``reference.py``.
_multiply, _add = libdevice.fmul_rn, libdevice.fadd_rn


@device_function
def _bits_as_float(bits):
    return libdevice.int_as_float(int32(bits))


@device_function
def _float_as_bits(value):
    return uint32(libdevice.float_as_int(value))


@device_function
def sign_of(word, bit):
    """Return -1 if the bit of the word is set, else +1, as float32."""
    sign = uint32(uint32(word << uint32(uint32(31) - uint32(bit))) & uint32(0x80000000))
    return _bits_as_float(uint32(sign | uint32(0x3F800000)))


@device_function
def flip(value, word, bit):
    """Return ``value``, negated if the bit of the word is set."""
    sign = uint32(uint32(word << uint32(uint32(31) - uint32(bit))) & uint32(0x80000000))
    return _bits_as_float(uint32(_float_as_bits(value) ^ sign))


@device_function
def widen(value):
    """Convert a float32 or float16 gradient to float32."""
    return float32(value)


@device_function
def widen_bfloat16(bits):
    """Convert a bfloat16 gradient, whose bits are stored as int16, to float32."""
    return _bits_as_float(uint32(uint32(int32(bits)) << uint32(16)))


_SD = float32(1 / 147.80166)
_C1, _C3, _C5 = float32(0.967765), float32(0.004002), float32(0.001905)


@device_function
def normal_of(word):
    """Return the normally distributed entry of R that ``reference.py`` defines for a word."""
    pairs = uint32(
        uint32(word & uint32(0x00FF00FF)) + uint32(uint32(word >> uint32(8)) & uint32(0x00FF00FF))
    )
    total = uint32(uint32(pairs & uint32(0xFFFF)) + uint32(pairs >> uint32(16)))
    x = _multiply(float32(int32(total) - int32(510)), _SD)
    x2 = _multiply(x, x)
    p = _add(_multiply(_C5, x2), _C3)
    p = _add(_multiply(p, x2), _C1)
    return _multiply(p, x)

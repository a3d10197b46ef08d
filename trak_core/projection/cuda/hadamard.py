"""Block-Hadamard projection on a GPU with fast Walsh-Hadamard transforms.

The result is the sum of E_b H D_b x_b over blocks b of k = proj_dim coordinates. Here x_b is the
gradient in a block, D_b and E_b are diagonal matrices of signs, and H is the Hadamard matrix. H is
applied by the fast transform, which takes k log2(k) additions instead of k^2. A block of threads
computes one transform of n = min(k, 8192) numbers of a row at a time. Each thread holds 16 numbers
in registers. It computes the butterflies for four bits of the numbers' index, exchanges numbers
with other threads through shared memory, and continues with the next bits. The sums over a slice
stay in registers. If k is small, a slice contains many blocks of coordinates, and their sums are
added in two stages, which reduces rounding errors.

For k > 8192, the k numbers do not fit into one block of threads. Let u be the upper bits of an
input's index, x_u the n inputs with these bits, and D their signs. The transform is linear, so the
outputs with upper bits z are the transform of the sum over u of (-1)^popcount(u & z) D x_u. Each z
has a block of threads, which adds these k / n terms while it reads them.
"""

from functools import cache
from typing import Any

from trak_core.projection.cuda.device_functions import (
    cuda,
    device_function,
    flip,
    float32,
    int32,
    int64,
    kernel,
    uint32,
    uint64,
    widen,
    widen_bfloat16,
    words_at,
)
from trak_core.projection.cuda.variants import held_bits
from trak_core.settings import ProjectionKind

_HADAMARD = ProjectionKind.HADAMARD.tag
_SIGNS_OUT = 2**31  # the number c0 of the first Philox call for E_b


def _butterflies(held, n_bits):
    n_values = 1 << held

    @device_function
    def transform(x):
        """Apply the first ``n_bits`` steps of a Hadamard transform to a thread's values."""
        for bit in range(n_bits):
            for v in range(n_values):
                if v & (1 << bit) == 0:
                    a, b = x[v], x[v | (1 << bit)]
                    x[v] = float32(a + b)
                    x[v | (1 << bit)] = float32(a - b)

    return transform


def _rounds(n_bits, held):
    """Return the rounds of a Hadamard transform of 2**n_bits numbers, a pair for each round.

    In a round, each thread transforms the values that it holds, whose indices differ in ``held``
    consecutive bits. The pair contains the lowest of these bits, and the number of these bits for
    which no earlier round has applied the butterflies.
    """
    low = n_bits - held
    rounds = [(low, held)]
    while low > 0:
        low, above = max(0, low - held), low
        rounds.append((low, above - low))
    return rounds


@cache
def hadamard_kernel(proj_dim: int, inner: int, n_rows_held: int, bfloat16: bool, flush: int) -> Any:
    """Return the Hadamard kernel for one ``proj_dim``.

    Each block of threads processes ``n_rows_held`` gradients with transforms of length ``inner``.
    After every ``flush`` blocks of coordinates, sums are added to totals, which reduces rounding
    errors. ``flush`` is a power of two.
    """
    in_stages = proj_dim < flush
    n_outer = proj_dim // inner
    held = held_bits(inner)
    n_values, n_threads = 1 << held, inner >> held
    n_all = n_threads * n_rows_held
    block_bits = proj_dim.bit_length() - 1
    padded = inner + inner // 16
    n_exchange = n_rows_held * padded
    n_in, n_out = max(1, proj_dim // 128), max(1, inner // 128)  # Philox calls for D and E
    n_words = 4 * (n_in + n_out)
    read = widen_bfloat16 if bfloat16 else widen
    rounds = _rounds(inner.bit_length() - 1, held)
    lows = tuple(low for low, _ in rounds) + (0,) * (4 - len(rounds))
    n_rounds = len(rounds)
    low0, low1, low2, low3 = lows
    first, second, third, fourth = (
        _butterflies(held, bits) for _, bits in rounds + [(0, 0)] * (4 - n_rounds)
    )

    @device_function
    def position_of(thread, low):
        """Return the position of a thread's first value in the shared array ``exchange``.

        The indices of the thread's values differ in the bits from ``low`` on.
        """
        upper = uint32(uint32(thread >> uint32(low)) << uint32(low + held))
        i = uint32(upper | uint32(thread & uint32((1 << low) - 1)))
        # A gap after every 16 entries lets threads access different banks of shared memory.
        return uint32(i + uint32(i >> uint32(4)))

    @device_function
    def swap(exchange, base, thread, x, before, after):
        """Exchange values between threads.

        Before the exchange, the indices of the values in a thread differ in the bits from
        ``before`` on. After the exchange, they differ in the bits from ``after`` on.
        """
        at = uint32(base + position_of(thread, before))
        for v in range(n_values):
            # The position without gaps is the sum of two numbers that have no bit in common, so the
            # gaps before both numbers can be added.
            exchange[uint32(at + uint32((v << before) + (v << before >> 4)))] = x[v]
        cuda.syncthreads()
        at = uint32(base + position_of(thread, after))
        for v in range(n_values):
            x[v] = exchange[uint32(at + uint32((v << after) + (v << after >> 4)))]
        # No barrier is needed here. The entries to which a thread writes next are those that it has
        # just read, and no other thread reads them.

    @device_function
    def sign_in(signs, first, v, thread):
        """Return the word with the sign of a thread's input ``v``, and the number of its bit.

        The input's index is first + v * n_threads + thread, where ``first`` is a multiple of 32.
        """
        if n_threads >= 32:
            word = uint32(uint32(first >> 5) + uint32(v * (n_threads >> 5)))
            return signs[uint32(word + uint32(thread >> uint32(5)))], thread & uint32(31)
        i = uint32(uint32(first + v * n_threads) + thread)
        return signs[uint32(i >> uint32(5))], uint32(i & uint32(31))

    @kernel(n_all, max(1, 768 // n_all))
    def _hadamard_kernel(values, sizes, partials, keys, stream):
        row_stride, origin, start, stop, n_rows, first_slice, slice_size, _ = sizes
        exchange = cuda.shared.array(n_exchange, dtype=float32)
        signs = cuda.shared.array(n_words, dtype=uint32)  # words of D, then of E
        x = cuda.local.array(n_values, dtype=float32)
        sums = cuda.local.array(n_values, dtype=float32)
        totals = cuda.local.array(n_values, dtype=float32)
        for v in range(n_values):
            sums[v] = float32(0)
            totals[v] = float32(0)
        row_held = cuda.threadIdx.x // n_threads
        thread = uint32(cuda.threadIdx.x - row_held * n_threads)
        base = uint32(row_held * padded)
        row = int64(cuda.blockIdx.x) * n_rows_held + row_held
        z = int32(cuda.blockIdx.z)
        slice_start = (first_slice + cuda.blockIdx.y) * slice_size
        begin, end = max(start, slice_start), min(stop, slice_start + slice_size)
        for block in range(begin >> block_bits, (end + proj_dim - 1) >> block_bits):
            cuda.syncthreads()
            for call in range(cuda.threadIdx.x, n_in + n_out, n_all):
                c0 = uint32(call)
                if call >= n_in:
                    c0 = uint32(uint32(call - n_in + z * n_out) + uint32(_SIGNS_OUT))
                w = words_at(c0, block, _HADAMARD, stream, keys)
                for i in range(4):
                    signs[4 * call + i] = w[i]
            cuda.syncthreads()
            zero = int64(block) << block_bits
            low = int32(max(int64(0), begin - zero))
            high = int32(min(int64(proj_dim), end - zero))
            if row >= n_rows:
                high = int32(0)
            at = row * row_stride + zero - origin
            for v in range(n_values):
                x[v] = float32(0)
            for u in range(n_outer):
                turned = uint32(cuda.popc(int32(u & z)) & 1)
                for v in range(n_values):
                    i = int32(u * inner + v * n_threads + thread)
                    if low <= i and i < high:
                        word, bit = sign_in(signs, u * inner, v, thread)
                        value = flip(read(values[uint64(at + i)]), word, bit)
                        x[v] += flip(value, turned, 0)
            first(x)
            if n_rounds > 1:
                swap(exchange, base, thread, x, low0, low1)
                second(x)
            if n_rounds > 2:
                swap(exchange, base, thread, x, low1, low2)
                third(x)
            if n_rounds > 3:
                swap(exchange, base, thread, x, low2, low3)
                fourth(x)
            for v in range(n_values):
                j = uint32(uint32(thread << uint32(held)) | uint32(v))
                word = signs[uint32(uint32(4 * n_in) + uint32(j >> uint32(5)))]
                sums[v] += flip(x[v], word, j & uint32(31))
            if in_stages and block & (flush - 1) == flush - 1:
                for v in range(n_values):
                    totals[v] += sums[v]
                    sums[v] = float32(0)
        if row < n_rows:
            line = (int64(cuda.blockIdx.y) * n_rows + row) * proj_dim + z * inner
            for v in range(n_values):
                partials[line + (int32(thread) << held) + v] = totals[v] + sums[v]

    return _hadamard_kernel

"""Define the projection matrix R, version 1, in readable but slow NumPy code.

This definition is part of the file format. Features from two machines can be compared only because
every backend computes exactly this matrix. The backends do not use the code in this module.

Random 32-bit words are outputs of Philox4x32-10, a function of a key and a counter. Therefore each
entry of R can be computed without the others, unlike with ``numpy.random.Generator``. The key
consists of the two halves of ``spec.seed``. The counter is

    (c0, low 32 bits of q, high 32 bits of q | tag << 24, stream).

Each call returns four words. For coordinate g (the row of R) and column j, each kind of projection
defines its tag, c0, q and which of the four words is used:

``rademacher`` (tag 0): c0 = j >> 2, q = 4 * (g >> 7) + ((g >> 1) & 3), word j & 3. A word contains
the signs of one column for 32 coordinates. The sign of g is bit
2 * ((g >> 4) & 7) + ((g >> 3) & 1) + 16 * (g & 1). The entry is -1 if the bit is set, else +1.

``normal`` (tag 1): c0 = j >> 2, q = g, word j & 3. Let s be the sum of the word's four bytes minus
510. The constants SD, C1, C3 and C5 are defined below. Every operation is rounded to float32,
without fused multiply-add: x = s * SD, x2 = x * x, p = C5 * x2 + C3, p = p * x2 + C1. The entry is
p * x. Its 1,021 possible values have mean 0, variance 0.99999 and excess kurtosis -0.003. Their
distribution function differs from that of N(0, 1) by at most 0.002.

``hadamard`` (tag 3): coordinates are split into blocks of k = proj_dim. Coordinate g has index
i = g % k in block b = g // k. The entry is E_b[j] * H[i, j] * D_b[i], where H[i, j] is
(-1)^popcount(i & j), and D_b and E_b are vectors of k signs. Sign v of D_b is bit v & 31 of word
w & 3 of the call c0 = w >> 2, q = b, where w = v >> 5. E_b is defined in the same way, but with
c0 = (w >> 2) + 2^31. A set bit means -1.

``tensor_sketch`` (tag 4): each parameter is a row-major matrix of shape n0 x n1, and the parameters
follow one another. The rows (s = 0) and the columns (s = 1) of parameter l have buckets and signs.
The row of R for entry (i, j) is sign0[i] sign1[j] in column (bucket0[i] + bucket1[j]) mod k, and 0
elsewhere. All words for l and s use q = 2 l + s. Index i has word i & 3 of the call c0 = i >> 2.
The bucket of i is the rank of its word among the k indices with the same i // k. Ties are ordered
by index. All k words are ranked even if the last group has fewer than k indices. The sign of i is
bit i & 31 of word w & 3 of the call c0 = (w >> 2) + 2^31, where w = i >> 5. A set bit means -1.

``identity``: the entry is 1 if j = g, else 0.
"""

import numpy as np

from trak_core.settings import ProjectionKind, ProjectionSpec

# No kind of projection may use tag 2, with which version 0.2.0 computed features. Otherwise, two
# different matrices would be derived from the same random words.
_MASK = np.uint64(0xFFFFFFFF)
_SD = np.float32(1 / 147.80166)
_C1, _C3, _C5 = np.float32(0.967765), np.float32(0.004002), np.float32(0.001905)


def philox4x32_reference(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return the four random 32-bit words for each of n counters, both of shape (4, n).

    The words are those of Philox4x32-10. The result has dtype uint64.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter.astype(np.uint64)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def _words(spec: ProjectionSpec, c0: np.ndarray, q: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return word ``index`` (0 to 3) of the Philox call with counter parts ``c0`` and ``q``."""
    c0, q, index = np.broadcast_arrays(c0, q, index)
    high = (q >> np.uint64(32)) | np.uint64(spec.kind.tag << 24)
    counter = np.stack([c0, q & _MASK, high, np.full_like(q, spec.stream)])
    key = spec.seed & 0xFFFFFFFF, spec.seed >> 32
    words = philox4x32_reference(counter.reshape(4, -1), key).reshape(4, *q.shape)
    return np.take_along_axis(words, index.astype(np.intp)[None], axis=0)[0]


def _signs(words: np.ndarray, bit: np.ndarray | np.uint64) -> np.ndarray:
    """Return -1 for each word in which the bit is set, and +1 for other words, as float64."""
    return 1.0 - 2.0 * ((words >> bit) & np.uint64(1)).astype(np.float64)


def _rademacher(spec: ProjectionSpec, g: np.ndarray, j: np.ndarray) -> np.ndarray:
    q = 4 * (g >> np.uint64(7)) + ((g >> np.uint64(1)) & np.uint64(3))
    words = _words(spec, j >> np.uint64(2), q, j & np.uint64(3))
    bit = 2 * ((g >> np.uint64(4)) & np.uint64(7)) + ((g >> np.uint64(3)) & np.uint64(1))
    return _signs(words, bit + 16 * (g & np.uint64(1)))


def _normal(spec: ProjectionSpec, g: np.ndarray, j: np.ndarray) -> np.ndarray:
    words = _words(spec, j >> np.uint64(2), g, j & np.uint64(3))
    byte_values = [(words >> np.uint64(8 * i)) & np.uint64(0xFF) for i in range(4)]
    x = (np.sum(byte_values, axis=0).astype(np.int64) - 510).astype(np.float32) * _SD
    x2 = x * x
    p = _C5 * x2 + _C3
    p = p * x2 + _C1
    return (p * x).astype(np.float64)


def _hadamard(spec: ProjectionSpec, g: np.ndarray, j: np.ndarray) -> np.ndarray:
    block, i = g // np.uint64(spec.proj_dim), g % np.uint64(spec.proj_dim)
    signs = np.ones(np.broadcast_shapes(g.shape, j.shape))
    for position, first in ((i, 0), (j, 2**31)):
        word = position >> np.uint64(5)
        c0 = (word >> np.uint64(2)) + np.uint64(first)
        words = _words(spec, c0, block, word & np.uint64(3))
        signs = signs * _signs(words, position & np.uint64(31))
    parity = np.bitwise_count(i & j) & np.uint8(1)
    return signs * (1.0 - 2.0 * parity)


def _buckets_and_signs(spec: ProjectionSpec, q: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensor sketch's buckets and signs of n rows or columns, shape (n,) each.

    ``q`` is 2 l for the rows of parameter l, and 2 l + 1 for its columns.
    """
    k = spec.proj_dim
    i = np.arange(-(-n // k) * k, dtype=np.uint64)
    words = _words(spec, i >> np.uint64(2), np.full_like(i, q), i & np.uint64(3)).reshape(-1, k)
    order = words.argsort(axis=1, kind="stable")
    buckets = np.empty_like(order)
    np.put_along_axis(buckets, order, np.arange(k)[None], axis=1)
    i = i[:n]
    word = i >> np.uint64(5)
    c0 = (word >> np.uint64(2)) + np.uint64(2**31)
    signs = _signs(_words(spec, c0, np.full_like(i, q), word & np.uint64(3)), i & np.uint64(31))
    return buckets.reshape(-1)[:n], signs


def _tensor_sketch(spec: ProjectionSpec, g: np.ndarray) -> np.ndarray:
    assert spec.shapes is not None
    matrix = np.zeros((len(g), spec.proj_dim))
    stop = 0
    for number, (n0, n1) in enumerate(spec.shapes):
        start, stop = stop, stop + n0 * n1
        (rows,) = np.nonzero((g[:, 0] >= start) & (g[:, 0] < stop))
        i, j = np.divmod(g[rows, 0].astype(np.int64) - start, n1)
        bucket0, sign0 = _buckets_and_signs(spec, 2 * number, n0)
        bucket1, sign1 = _buckets_and_signs(spec, 2 * number + 1, n1)
        matrix[rows, (bucket0[i] + bucket1[j]) % spec.proj_dim] = sign0[i] * sign1[j]
    return matrix


def projection_matrix(
    spec: ProjectionSpec, first: int = 0, n_rows: int | None = None
) -> np.ndarray:
    """Return rows of the unscaled projection matrix R, shape (n_rows, spec.proj_dim), float64.

    The rows start at coordinate ``first``. By default, all rows from ``first`` on are returned.
    """
    n_rows = spec.n_params - first if n_rows is None else n_rows
    g = np.uint64(first) + np.arange(n_rows, dtype=np.uint64)[:, None]
    j = np.arange(spec.proj_dim, dtype=np.uint64)[None, :]
    match spec.kind:
        case ProjectionKind.RADEMACHER:
            return _rademacher(spec, g, j)
        case ProjectionKind.NORMAL:
            return _normal(spec, g, j)
        case ProjectionKind.HADAMARD:
            return _hadamard(spec, g, j)
        case ProjectionKind.TENSOR_SKETCH:
            return _tensor_sketch(spec, g)
        case ProjectionKind.IDENTITY:
            return (g == j).astype(np.float64)

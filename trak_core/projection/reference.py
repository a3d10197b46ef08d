"""The definition of the projection matrix, version 1, written to be read: dense, NumPy, slow.

Everything here is a file format: features made on one machine mean something on another only
because every backend makes this very matrix. It shares no code with the backends.

Every random word is one of the four of a Philox4x32-10 call, keyed with the two halves of the seed,
at the counter

    (c0, low 32 bits of q, high 32 bits of q | tag << 24, stream).

For coordinate g (row of R) and column j:

``rademacher`` (tag 0): c0 = j >> 2, q = 4 * (g >> 7) + ((g >> 1) & 3), word j & 3. A word holds one
column's signs for 32 coordinates; the one of g is bit
2 * ((g >> 4) & 7) + ((g >> 3) & 1) + 16 * (g & 1): -1 where it is set, else +1.

``normal`` (tag 1): c0 = j >> 2, q = g, word j & 3. With s the sum of the word's four bytes less
510, and every step rounded to float32: x = s * SD, x2 = x * x, p = C5 * x2 + C3, p = p * x2 + C1,
entry p * x; the products and sums are never contracted to one rounding. The 1,021 levels have mean
0, variance 0.99999 and excess kurtosis -0.003, and keep within 0.002 of N(0, 1)'s distribution.

``hadamard`` (tag 3): coordinates come in blocks of k = proj_dim, b = g // k, i = g % k; the entry
is E_b[j] * H[i, j] * D_b[i] with H[i, j] = (-1)^popcount(i & j) and two vectors of k signs: sign v
of D_b is bit v & 31 of word w = v >> 5, where c0 = w >> 2, q = b, and the word of the call is
w & 3; E_b is made alike with c0 = (w >> 2) + 2^31. A set bit is -1.

``tensor_sketch`` (tag 4): each parameter is a matrix n0 x n1, the parameters one after the other,
row-major. Its sides, rows (0) and columns (1), have buckets and signs: entry (i, j) of parameter l
is sign0[i] sign1[j] in column (bucket0[i] + bucket1[j]) mod k, and 0 in all others. For side s,
q = 2 l + s. The bucket of index i is its rank among the words of its run of k indices, those with
the same i // k (ties by index, and all k words count though the last run may have fewer indices),
its word being word i & 3 of the call c0 = i >> 2. Its sign is bit i & 31 of word w & 3 of the call
c0 = (w >> 2) + 2^31, w = i >> 5; a set bit is -1.

``identity``: 1 where j = g, else 0; nothing is random.
"""

import numpy as np

from trak_core.spec import ProjectionKind, ProjectionSpec

# Tag 2 is reserved and never used for another kind: features of version 0.2.0 were made with it.
_MASK = np.uint64(0xFFFFFFFF)
_SD = np.float32(1 / 147.80166)
_C1, _C3, _C5 = np.float32(0.967765), np.float32(0.004002), np.float32(0.001905)


def philox4x32_reference(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return Philox4x32-10 of counters (4, n): words of that shape, 32 bits in uint64 each.

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


def _words(spec: ProjectionSpec, c0: np.ndarray, q: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return word ``which`` of the call at (c0, q): the arguments broadcast, uint64."""
    c0, q, which = np.broadcast_arrays(c0, q, which)
    high = (q >> np.uint64(32)) | np.uint64(spec.kind.tag << 24)
    counter = np.stack([c0, q & _MASK, high, np.full_like(q, spec.stream)])
    key = spec.seed & 0xFFFFFFFF, spec.seed >> 32
    words = philox4x32_reference(counter.reshape(4, -1), key).reshape(4, *q.shape)
    return np.take_along_axis(words, which.astype(np.intp)[None], axis=0)[0]


def _signs(words: np.ndarray, bit: np.ndarray | np.uint64) -> np.ndarray:
    """Return -1 where the bit is set, else +1, in float64."""
    return 1.0 - 2.0 * ((words >> bit) & np.uint64(1)).astype(np.float64)


def _rademacher(spec: ProjectionSpec, g: np.ndarray, j: np.ndarray) -> np.ndarray:
    q = 4 * (g >> np.uint64(7)) + ((g >> np.uint64(1)) & np.uint64(3))
    words = _words(spec, j >> np.uint64(2), q, j & np.uint64(3))
    bit = 2 * ((g >> np.uint64(4)) & np.uint64(7)) + ((g >> np.uint64(3)) & np.uint64(1))
    return _signs(words, bit + 16 * (g & np.uint64(1)))


def _normal(spec: ProjectionSpec, g: np.ndarray, j: np.ndarray) -> np.ndarray:
    words = _words(spec, j >> np.uint64(2), g, j & np.uint64(3))
    four = [(words >> np.uint64(8 * i)) & np.uint64(0xFF) for i in range(4)]
    x = (np.sum(four, axis=0).astype(np.int64) - 510).astype(np.float32) * _SD
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


def _side(spec: ProjectionSpec, q: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return buckets and signs of one side of a parameter, shape (n,) each."""
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
        (own,) = np.nonzero((g[:, 0] >= start) & (g[:, 0] < stop))
        i, j = np.divmod(g[own, 0].astype(np.int64) - start, n1)
        bucket0, sign0 = _side(spec, 2 * number, n0)
        bucket1, sign1 = _side(spec, 2 * number + 1, n1)
        matrix[own, (bucket0[i] + bucket1[j]) % spec.proj_dim] = sign0[i] * sign1[j]
    return matrix


def projection_matrix(
    spec: ProjectionSpec, first: int = 0, n_rows: int | None = None
) -> np.ndarray:
    """Return rows of the unscaled projection matrix R, (n_rows, spec.proj_dim), float64.

    They begin at the coordinate ``first``; without ``n_rows`` they are all from there on.
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


def project_reference(gradients: np.ndarray, spec: ProjectionSpec) -> np.ndarray:
    """Return ``gradients @ R``, unscaled, in float64: shape (n_samples, spec.proj_dim)."""
    return gradients.astype(np.float64) @ projection_matrix(spec)

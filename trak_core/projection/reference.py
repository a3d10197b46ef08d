"""The definition of the projection matrix, version 1, written to be read: dense, NumPy, slow.

Everything here is a file format: features made on one machine mean something on another only
because every backend makes this very matrix. It shares no code with the backends.

An entry of ``rademacher`` is one bit. Philox4x32-10 is keyed with the two halves of the seed; with
``q = 4 * (g >> 7) + ((g >> 1) & 3)`` its counter for coordinate g and column j is

    (j >> 2, low 32 bits of q, high 32 bits of q | tag << 24, stream),      tag 0 for rademacher

and of the four words of output, word ``j & 3`` holds the signs of column j for 32 coordinates; the
one of g is bit ``2 * ((g >> 4) & 7) + ((g >> 3) & 1) + 16 * (g & 1)``: -1 where it is set, else +1.
"""

import numpy as np

from trak_core.spec import ProjectionSpec

_MASK = np.uint64(0xFFFFFFFF)
_RADEMACHER_TAG = 0


def philox4x32_reference(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return Philox4x32-10 of many counters.

    Args:
        counter: Shape (4, n), uint64 holding 32-bit values.
        key: Two 32-bit values.

    Returns:
        Shape (4, n), uint64 holding 32-bit words.

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


def projection_matrix(
    spec: ProjectionSpec, first: int = 0, n_rows: int | None = None
) -> np.ndarray:
    """Return rows of the unscaled projection matrix R.

    Args:
        spec: The projection.
        first: Coordinate of the first row.
        n_rows: How many rows; None for all of the matrix from ``first`` on.

    Returns:
        Shape (n_rows, spec.proj_dim), float64, entries +1 or -1.
    """
    n_rows = spec.n_params - first if n_rows is None else n_rows
    g = first + np.arange(n_rows, dtype=np.uint64)[:, None]
    j = np.arange(spec.proj_dim, dtype=np.uint64)[None, :]
    g, j = np.broadcast_arrays(g, j)
    q = 4 * (g >> np.uint64(7)) + ((g >> np.uint64(1)) & np.uint64(3))
    high = (q >> np.uint64(32)) | np.uint64(_RADEMACHER_TAG << 24)
    counter = np.stack([j >> np.uint64(2), q & _MASK, high, np.full_like(q, spec.stream)])
    words = philox4x32_reference(
        counter.reshape(4, -1), (spec.seed & 0xFFFFFFFF, spec.seed >> 32)
    ).reshape(4, *g.shape)
    word = np.take_along_axis(words, (j & np.uint64(3)).astype(np.intp)[None], axis=0)[0]
    bit = 2 * ((g >> np.uint64(4)) & np.uint64(7)) + ((g >> np.uint64(3)) & np.uint64(1))
    bit = bit + 16 * (g & np.uint64(1))
    return 1.0 - 2.0 * ((word >> bit) & np.uint64(1)).astype(np.float64)


def project_reference(gradients: np.ndarray, spec: ProjectionSpec) -> np.ndarray:
    """Return ``gradients @ R``, unscaled, in float64: shape (n_samples, spec.proj_dim)."""
    return gradients.astype(np.float64) @ projection_matrix(spec)

"""Rows of length 1: directions of gradients or embeddings; NumPy only."""

import numpy as np


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows divided by their lengths, float64; a row of zeros stays one.

    Args:
        rows: Shape (rows, k), any float dtype.
    """
    rows = rows.astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(lengths > 0, lengths, 1)
    return rows

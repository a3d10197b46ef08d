"""Loss weights as they count in scores; NumPy only."""

import numpy as np


def powered(loss_weights: np.ndarray, power: float) -> np.ndarray:
    """Return the loss weights with their size raised to ``power`` and their sign kept, float64."""
    weights = loss_weights.astype(np.float64)
    return np.sign(weights) * np.abs(weights) ** power

"""Draw the subsets that models are retrained on, and the seeds of the trainings.

Each result depends on the arguments alone, so that jobs agree on it.
"""

import math

import numpy as np


def random_subset(n_train: int, size: int, subset: int, seed: int) -> np.ndarray:
    """Return which training samples are in a uniform random subset of ``size``, shape (n,), bool.

    The subset with number ``subset`` does not depend on the number of subsets.
    """
    return _chosen(n_train, size, [0, seed, subset])


def random_removal(n_train: int, n_removed: int, draw: int, seed: int) -> np.ndarray:
    """Return which training samples remain without ``n_removed`` random ones, shape (n,), bool."""
    return ~_chosen(n_train, n_removed, [1, seed, n_removed, draw])


def sizes_of(
    fractions: list[float], n_train: int, n_listed: int, *, rounds_up: bool = False
) -> list[int]:
    """Return the distinct numbers of samples that are fractions of the training set, ascending.

    Each number is at least 1, and at most ``n_listed`` and ``n_train - 1``. The result is empty if
    no sample is listed. With ``rounds_up`` numbers are rounded up instead of to the nearest, as the
    lengths of some lists are.
    """
    if not n_listed:
        return []
    most = min(n_listed, n_train - 1)
    rounded = math.ceil if rounds_up else round
    return sorted({min(max(1, rounded(part * n_train)), most) for part in fractions})


def training_seed(seed: int, subset: int, repeat: int) -> int:
    """Return the seed of one retraining, below 2^31, which depends on subset and repeat."""
    state = np.random.SeedSequence([2, seed, subset, repeat]).generate_state(1)[0]
    return int(state) % 2**31


def _chosen(n: int, size: int, seed: list[int]) -> np.ndarray:
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(seed).choice(n, size=size, replace=False)] = True
    return chosen

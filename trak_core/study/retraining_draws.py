"""What models are retrained on: random subsets, and the seeds of the trainings.

Everything here is a function of its arguments alone, so that jobs draw alike wherever they run.
"""

import math

import numpy as np


def random_subset(n_train: int, size: int, subset: int, seed: int) -> np.ndarray:
    """Return which training samples belong to a random subset of a size, shape (n,), bool.

    Every subset of that size is equally likely; how many subsets there are doesn't count.
    """
    return _chosen(n_train, size, [0, seed, subset])


def random_removal(n_train: int, n_removed: int, draw: int, seed: int) -> np.ndarray:
    """Return which training samples stay when ``n_removed`` random ones go, shape (n,), bool."""
    return ~_chosen(n_train, n_removed, [1, seed, n_removed, draw])


def sizes_of(
    fractions: list[float], n_train: int, n_listed: int, *, rounds_up: bool = False
) -> list[int]:
    """Return how many samples each part of the training set is, at most those that are listed.

    Each is at least 1 and leaves one; equal ones count once. Sorted. Without a listed sample there
    are none. ``rounds_up`` is for a list that has such a part itself, rounded up.
    """
    if not n_listed:
        return []
    most = min(n_listed, n_train - 1)
    whole = math.ceil if rounds_up else round
    return sorted({min(max(1, whole(part * n_train)), most) for part in fractions})


def training_seed(seed: int, subset: int, repeat: int) -> int:
    """Return the seed of one retraining, below 2^31: its own for every subset and repeat."""
    state = np.random.SeedSequence([2, seed, subset, repeat]).generate_state(1)[0]
    return int(state) % 2**31


def _chosen(n: int, size: int, seed: list[int]) -> np.ndarray:
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(seed).choice(n, size=size, replace=False)] = True
    return chosen

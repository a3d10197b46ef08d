"""Draw the subsets on which models are retrained, and the seeds with which they are trained.

The results depend only on the arguments, so all jobs draw the same subsets and seeds.
"""

import math

import numpy as np


def random_subset(n_train: int, size: int, subset: int, seed: int) -> np.ndarray:
    """Return a bool mask, shape (n_train,), of a uniformly random subset of the training samples.

    The mask is True for the ``size`` samples in the subset. ``subset`` is the number of the subset.
    A subset depends only on its number, its size and the seed, not on how many others are drawn.
    """
    return _chosen(n_train, size, [0, seed, subset])


def random_removal(n_train: int, n_removed: int, draw: int, seed: int) -> np.ndarray:
    """Return a bool mask, shape (n_train,), that is False for ``n_removed`` random samples.

    ``draw`` is the number of the draw. Draws with different numbers are independent.
    """
    return ~_chosen(n_train, n_removed, [1, seed, n_removed, draw])


def sizes_of(
    fractions: list[float], n_train: int, n_listed: int, *, rounds_up: bool = False
) -> list[int]:
    """Convert fractions of the training set to numbers of samples to remove or to keep.

    A fraction is multiplied by ``n_train``. The product is rounded to the nearest integer, or up if
    ``rounds_up`` is true, and then limited to at least 1, and to at most ``n_listed`` (the number
    of samples in a list) and ``n_train - 1``.

    Returns:
        The distinct numbers in ascending order. The list is empty if ``n_listed`` is 0.
    """
    if not n_listed:
        return []
    most = min(n_listed, n_train - 1)
    rounded = math.ceil if rounds_up else round
    return sorted({min(max(1, rounded(part * n_train)), most) for part in fractions})


def training_seed(seed: int, subset: int, repeat: int) -> int:
    """Return the seed (below 2^31) with which model number ``repeat`` of a subset is trained."""
    state = np.random.SeedSequence([2, seed, subset, repeat]).generate_state(1)[0]
    return int(state) % 2**31


def _chosen(n: int, size: int, seed: list[int]) -> np.ndarray:
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(seed).choice(n, size=size, replace=False)] = True
    return chosen

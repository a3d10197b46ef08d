"""Draw the subsets on which models are retrained, and the seeds with which they are trained.

Each result depends only on the arguments, so all jobs draw the same subsets and seeds.
"""

import math

import numpy as np


def random_subset(n_train: int, size: int, subset: int, seed: int) -> np.ndarray:
    """Return the mask of a uniformly random subset of ``size`` training samples, shape (n,), bool.

    The result for the number ``subset`` does not depend on the total number of subsets.
    """
    return _chosen(n_train, size, [0, seed, subset])


def random_removal(n_train: int, n_removed: int, draw: int, seed: int) -> np.ndarray:
    """Return a mask, shape (n,), bool, that is False for ``n_removed`` random training samples."""
    return ~_chosen(n_train, n_removed, [1, seed, n_removed, draw])


def sizes_of(
    fractions: list[float], n_train: int, n_listed: int, *, rounds_up: bool = False
) -> list[int]:
    """Convert fractions of the training set to distinct numbers of samples, ascending.

    Numbers are rounded to the nearest integer, or up if ``rounds_up`` is true. They are at least 1,
    and at most ``n_listed`` and ``n_train - 1``.

    Returns:
        The numbers. The list is empty if ``n_listed`` is 0.
    """
    if not n_listed:
        return []
    most = min(n_listed, n_train - 1)
    rounded = math.ceil if rounds_up else round
    return sorted({min(max(1, rounded(part * n_train)), most) for part in fractions})


def training_seed(seed: int, subset: int, repeat: int) -> int:
    """Return a seed below 2^31 for model number ``repeat`` that is trained on a subset."""
    state = np.random.SeedSequence([2, seed, subset, repeat]).generate_state(1)[0]
    return int(state) % 2**31


def _chosen(n: int, size: int, seed: list[int]) -> np.ndarray:
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(seed).choice(n, size=size, replace=False)] = True
    return chosen

"""Measure what a list of training samples is worth, by models retrained without it or on it."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from trak_core.model_outputs.table import About

CONFIDENCE = 0.95
_N_DRAWS = 1000
# Numbers of one block of draws.
_BLOCK = 2**24


def mean_interval(changes: np.ndarray) -> tuple[float, float]:
    """Return the ends of the percentile bootstrap interval of a mean over trainings and targets.

    ``changes`` has shape (seeds, targets). Both are drawn anew, because all targets share the
    models that saw everything, and what these have by chance must not look like an effect.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    random = np.random.default_rng(0)
    seeds, targets = (random.integers(n, size=(_N_DRAWS, n)) for n in changes.shape)
    block = max(1, _BLOCK // changes.size)
    means = [
        changes[seeds[i : i + block, :, None], targets[i : i + block, None, :]].mean(axis=(1, 2))
        for i in range(0, _N_DRAWS, block)
    ]
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [outside, 1 - outside])
    return float(low), float(high)


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


def measures(
    about: About, outputs: np.ndarray, predictions: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what models make of targets, one number a model and target, float64.

    ``output`` is f. For classes there are ``accuracy``, 1 where the prediction is the label, and
    ``target_loss``, -log p of the label, which is log(1 + exp(-f)); in a regression that is half
    the squared error. Other model outputs have no loss that follows from f.

    Args:
        about: The model output.
        outputs: f, shape (models, m).
        predictions: Likewise, what the model says.
        labels: The targets' labels, shape (m,).
    """
    f = outputs.astype(np.float64)
    if about.labels_are_classes:
        right = (predictions == labels).astype(np.float64)
        return {"accuracy": right, "target_loss": np.logaddexp(0, -f), "output": f}
    if about.weighs_by_curvature:  # and no classes: a regression
        return {"target_loss": (labels - f) ** 2 / 2, "output": f}
    return {"output": f}


def proof_tables(
    values: Mapping[str, np.ndarray], sizes: list[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary`` and ``models``.

    Args:
        values: For each measure (draws, 1 + 2 S, m): of models that saw everything, those without
            (or on) the list's first samples, and those without (or on) as many random ones.
        sizes: The S numbers of samples.

    Returns:
        ``summary`` has means over draws and targets with intervals, of ``everything``, the
        ``list``, ``random`` samples, and the ``difference`` list less random: both of one draw
        have one seed, so that what a seed does cancels. ``models`` has each model's mean over
        targets.
    """
    rows, models, n = [], [], len(sizes)
    for measure, numbers in values.items():
        parts = {("everything", 0): numbers[:, 0]}
        parts |= {("list", size): numbers[:, 1 + i] for i, size in enumerate(sizes)}
        parts |= {("random", size): numbers[:, 1 + n + i] for i, size in enumerate(sizes)}
        for (subset, size), one in parts.items():
            means = enumerate(one.mean(axis=1).tolist())
            models += [(measure, subset, size, draw, mean) for draw, mean in means]
        parts |= {
            ("difference", size): parts["list", size] - parts["random", size] for size in sizes
        }
        rows += [
            (measure, subset, size, float(one.mean()), *mean_interval(one))
            for (subset, size), one in parts.items()
        ]
    return (
        pd.DataFrame(rows, columns=["measure", "subset", "n", "mean", "low", "high"]),
        pd.DataFrame(models, columns=["measure", "subset", "n", "draw", "mean"]),
    )

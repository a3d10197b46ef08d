"""Measure what a list of training samples is worth, by models retrained without it or on it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from trak_core.model_outputs.table import About
from trak_core.scoring.groups import interval

# How rows begin that compare the scores with a baseline; its name follows.
LESS = "top less "
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
    low, high = interval(np.concatenate(means), axis=0)
    return float(low), float(high)


def measures(
    about: About, outputs: np.ndarray, predictions: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what models make of targets, one number a model and target, float64.

    ``output`` is f. For classes there are ``accuracy``, 1 where the prediction is the label, and
    ``target_loss``, -log p of the label, which is log(1 + exp(-f)); in a regression that is half
    the squared error. Other model outputs have no loss that follows from f. Outputs and predictions
    have shape (models, m), the targets' labels (m,).
    """
    f = outputs.astype(np.float64)
    if about.labels_are_classes:
        right = (predictions == labels).astype(np.float64)
        return {"accuracy": right, "target_loss": np.logaddexp(0, -f), "output": f}
    if about.weighs_by_curvature:  # and no classes: a regression
        return {"target_loss": (labels - f) ** 2 / 2, "output": f}
    return {"output": f}


def against_random(
    own: Mapping[int, np.ndarray], random: Mapping[int, np.ndarray], name: str
) -> dict[tuple[str, int], np.ndarray]:
    """Return numbers of models without (or on) samples beside those of random ones, by size.

    The keys are ``name`` or ``random`` or ``difference`` (own less random), and the size. Entries
    that are subtracted belong to models of one seed, so that what a seed does cancels.
    """
    less = {size: own[size] - random[size] for size in own}
    subsets = {name: own, "random": random, "difference": less}
    return {(subset, size): of[size] for subset, of in subsets.items() for size in of}


def proof_tables(
    values: Mapping[str, np.ndarray], sizes: list[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary``, of means over draws and targets, and ``models``, over targets.

    The values of each measure have shape (draws, 1 + 2 S, m): those of models that saw everything,
    of those without (or on) the list's first samples, and of those without (or on) as many random
    ones, for each of S sizes.
    """
    rows, models, n = [], [], len(sizes)
    for measure, numbers in values.items():
        own = {size: numbers[:, 1 + i] for i, size in enumerate(sizes)}
        random = {size: numbers[:, 1 + n + i] for i, size in enumerate(sizes)}
        parts = {("everything", 0): numbers[:, 0]} | against_random(own, random, "list")
        for (subset, size), part in parts.items():
            rows.append((measure, subset, size, float(part.mean()), *mean_interval(part)))
            if subset != "difference":
                means = enumerate(part.mean(axis=1).tolist())
                models += [(measure, subset, size, draw, mean) for draw, mean in means]
    return (
        pd.DataFrame(rows, columns=["measure", "subset", "n", "mean", "low", "high"]),
        pd.DataFrame(models, columns=["measure", "subset", "n", "draw", "mean"]),
    )


def removal_tables(
    top: Mapping[int, tuple[np.ndarray, np.ndarray]],
    random: Mapping[int, tuple[np.ndarray, np.ndarray]],
    everything: tuple[np.ndarray, np.ndarray],
    target_ids: Sequence[Any],
    baselines: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]] = MappingProxyType({}),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary`` and ``targets`` of removals of each target's own samples.

    An effect is ``change``, of f from the models that saw everything, and where predictions are
    classes ``flips``, the part of models that predict another. Models of one seed are compared.

    By the number removed there are outputs and predictions of models without each target's most
    helpful samples (``top``), shape (1, seeds, m), and without random ones, (draws, seeds, m);
    those of ``everything`` have (seeds, m). Baselines, by name, are like ``top``. Each has rows of
    its name, and of ``top less`` it.
    """

    def effects(models: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        outputs, predictions = models
        changes = {"change": (outputs.astype(np.float64) - everything[0]).mean(axis=0)}
        if predictions.dtype.kind != "f":
            changes["flips"] = (predictions != everything[1]).mean(axis=0)
        return changes

    own, chance = (
        {size: effects(of_size) for size, of_size in models.items()} for models in (top, random)
    )
    measured = {
        key: against_random(
            {size: own[size][key] for size in own}, {size: chance[size][key] for size in own}, "top"
        )
        for key in next(iter(own.values()))
    }
    for name, models in baselines.items():
        for size, of_size in models.items():
            for key, values in effects(of_size).items():
                measured[key][name, size] = values
                measured[key][f"{LESS}{name}", size] = own[size][key] - values
    rows, tables = [], []
    about = {"target_id": target_ids, "output": everything[0].mean(axis=0, dtype=np.float64)}
    for removed, size in measured["change"]:
        values = {key: of[removed, size] for key, of in measured.items()}
        low, high = mean_interval(values["change"])
        means = {key: float(value.mean()) for key, value in values.items()}
        of_size = {"removed": removed, "n_removed": size}
        rows.append(of_size | means | {"low": low, "high": high})
        if removed != "difference" and not removed.startswith(LESS):
            by_target = {key: value.mean(axis=0) for key, value in values.items()}
            tables.append(pd.DataFrame(of_size | about | by_target))
    return pd.DataFrame(rows), pd.concat(tables, ignore_index=True)

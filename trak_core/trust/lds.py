"""Linear datamodeling scores: an evaluation's tables, from subset sums and retrained models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trak_core.config.sweep import Setting
from trak_core.trust.correlations import bootstrap, noise_ceiling, percentiles, rank_correlations
from trak_core.trust.rivals import Key

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Retrained models in the order of a scores file's samples and targets.

    Attributes:
        masks: 1 where a subset has a training sample, shape (subsets, n), float64.
        outputs: f of the models, shape (seeds, subsets, m), float64.
        source: Hashes of the files' content.
    """

    masks: np.ndarray
    outputs: np.ndarray
    source: list[str]


def lds_tables(
    methods: Mapping[Key, np.ndarray],
    by_count: Mapping[int, np.ndarray],
    truth: GroundTruth,
    target_ids: list[Any],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Correlate every target, and bootstrap everything on the same draws.

    Args:
        methods: Subset sums of each row of the summary, the scores' first.
        by_count: Those of the scores, by the number of checkpoints.
        truth: Retrained models.
        target_ids: Ids of the targets.

    Returns:
        The tables ``summary``, ``targets`` and ``checkpoints``.
    """
    mean = truth.outputs.mean(axis=0)
    each = {key: rank_correlations(sums, mean) for key, sums in methods.items()}
    drawn = bootstrap([*methods.values(), *by_count.values()], truth.outputs)
    rows = list(range(len(methods)))
    if len(truth.outputs) > 1:
        each["noise_ceiling", "ceiling", 0] = noise_ceiling(truth.outputs)
        rows.append(-1)
    intervals = percentiles(drawn, CONFIDENCE)
    ends = intervals[rows]
    # Paired: both of a difference come from the same draws. The scores are the first row.
    behind = percentiles(drawn[:, :1] - drawn[:, rows], CONFIDENCE)
    lds = np.array([found.mean() for found in each.values()])
    summary = pd.DataFrame({
        "method": [name for name, _, _ in each],
        "kind": [kind for _, kind, _ in each],
        "proj_dim": [dim for _, _, dim in each],
        "lds": lds,
        "low": ends[:, 0],
        "high": ends[:, 1],
        "behind": lds[0] - lds,
        "behind_low": behind[:, 0],
        "behind_high": behind[:, 1],
    })
    targets = pd.concat(
        [
            pd.DataFrame({
                "method": name,
                "proj_dim": dim,
                "target_id": target_ids,
                "correlation": found,
            })
            for (name, _, dim), found in each.items()
        ],
        ignore_index=True,
    )
    curve_ends = intervals[len(methods) : len(methods) + len(by_count)]
    curve = pd.DataFrame({
        "n_checkpoints": list(by_count),
        "lds": [rank_correlations(sums, mean).mean() for sums in by_count.values()],
        "low": curve_ends[:, 0],
        "high": curve_ends[:, 1],
    })
    return summary, targets, curve


def sweep_tables(
    swept: Mapping[Setting, np.ndarray], own: Setting, truth: GroundTruth
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Choose a setting on every other target and report it on the others, beside the study's own.

    A single target is both.

    Args:
        swept: Subset sums of each setting.
        own: The study's own.
        truth: Retrained models.

    Returns:
        The tables ``sweep`` and ``best``.
    """
    mean = truth.outputs.mean(axis=0)
    choosing = slice(0, None, 2)
    reporting = slice(1, None, 2) if mean.shape[1] > 1 else slice(None)
    each = {setting: rank_correlations(sums, mean) for setting, sums in swept.items()}
    rows = [
        {
            **{name: getattr(setting, name) for name in Setting.__slots__},
            "lds_chosen_by": found[choosing].mean(),
            "lds_reported": found[reporting].mean(),
            "lds": found.mean(),
        }
        for setting, found in each.items()
    ]
    sweep = pd.DataFrame(rows)
    settings = list(swept)
    shown = [int(sweep["lds_chosen_by"].argmax()), settings.index(own)]
    sums = [swept[settings[row]][:, reporting] for row in shown]
    intervals = percentiles(bootstrap(sums, truth.outputs[:, :, reporting]), CONFIDENCE)
    best = sweep.iloc[shown].drop(columns="lds")
    best.insert(0, "setting", ["best", "config"])
    best[["low", "high"]] = intervals[:2]
    return sweep, best.reset_index(drop=True)

"""Linear datamodeling scores: an evaluation's tables, from subset sums and retrained models."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from trak_core.errors import InputError
from trak_core.evaluation.baselines import Key
from trak_core.evaluation.correlations import (
    bootstrap,
    noise_ceiling,
    percentiles,
    rank_correlations,
)
from trak_core.spec import Setting

CONFIDENCE = 0.95
# A matrix with the names of its rows and of its columns.
Frame = tuple[np.ndarray, list[Any], list[Any]]


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


def order_models(
    masks: Frame, outputs: Frame, train_ids: Sequence[Any], target_ids: Sequence[Any], name: object
) -> tuple[np.ndarray, np.ndarray]:
    """Put a file's subsets and retrained models in the order of the study's samples.

    Masks are 0 and 1; rows are subsets, columns are training samples. Rows of outputs f are models,
    each named by its subset; columns are targets and others. A file that is about other samples, or
    has not as many models of each subset, is refused by its ``name``.

    Returns:
        Masks of shape (S, n) and outputs of shape (seeds, S, m), float64.
    """
    subsets, of_models = masks[1], outputs[1]
    extra = set(masks[2]) - set(train_ids)
    if extra:
        raise InputError(
            f"{name}: the columns of `masks` must be the training samples of the study. Found "
            f"others, such as {sorted(map(str, extra))[0]}."
        )
    chosen = _columns(masks, train_ids, name, "masks")
    values = _columns(outputs, target_ids, name, "outputs")
    if not np.isin(chosen, (0, 1)).all():
        raise InputError(f"{name}: `masks` must hold 0 and 1 only. Found {chosen.max():g}.")
    rows = {subset: [] for subset in subsets}
    for row, subset in enumerate(of_models):
        if subset not in rows:
            raise InputError(
                f"{name}: every row of `outputs` must be named by its subset, a row of `masks`. "
                f"Found {subset!r}, which is none."
            )
        rows[subset].append(row)
    counts = {len(models) for models in rows.values()}
    if len(rows) < len(subsets) or len(counts) > 1 or 0 in counts:
        raise InputError(
            f"{name}: `masks` must have each subset once, and `outputs` as many models of one as "
            f"of any other. Found {len(subsets)} rows of {len(rows)} subsets, with "
            f"{min(counts, default=0)} to {max(counts, default=0)} models each."
        )
    return chosen, np.stack([values[rows[subset]] for subset in subsets], axis=1)


def _columns(frame: Frame, ids: Sequence[Any], name: object, key: str) -> np.ndarray:
    """Return a frame's columns of these ids, float64."""
    values, _, columns = frame
    position = {column: i for i, column in enumerate(columns)}
    missing = [i for i in ids if i not in position]
    if missing or len(position) < len(columns):
        raise InputError(
            f"{name}: the columns of `{key}` must be the study's ids, each once. Found "
            f"{len(columns)} columns, such as {columns[0] if columns else 'none'!r}, and no "
            f"{', '.join(map(str, missing[:4]))}."
        )
    return values[:, [position[i] for i in ids]].astype(np.float64)


def curve_counts(n_checkpoints: int) -> list[int]:
    """Return 1, 2, 3, 5, 10, 20, 30, 50, 100, ... below a number of checkpoints, and it."""
    steps = [digit * 10**power for power in range(4) for digit in (1, 2, 3, 5)]
    return [count for count in steps if count < n_checkpoints] + [n_checkpoints]


def lds_tables(
    methods: Mapping[Key, np.ndarray],
    by_count: Mapping[int, np.ndarray],
    truth: GroundTruth,
    target_ids: list[Any],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return ``summary``, ``targets`` and ``checkpoints``, bootstrapped on the same draws.

    Methods are subset sums of each row of the summary, the scores' first; ``by_count`` those of the
    scores, by the number of checkpoints.
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
    lds = np.array([correlations.mean() for correlations in each.values()])
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
    targets = pd.DataFrame(
        [
            (name, dim, target, correlation)
            for (name, _, dim), correlations in each.items()
            for target, correlation in zip(target_ids, correlations, strict=True)
        ],
        columns=["method", "proj_dim", "target_id", "correlation"],
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
    """Return the tables ``sweep`` and ``best``, from subset sums of each setting.

    The best setting is chosen on every other target and reported on the others, beside the study's
    own setting. A single target is both.
    """
    mean = truth.outputs.mean(axis=0)
    choosing = slice(0, None, 2)
    reporting = slice(1, None, 2) if mean.shape[1] > 1 else slice(None)
    each = [rank_correlations(sums, mean) for sums in swept.values()]
    sweep = pd.DataFrame([asdict(setting) for setting in swept])
    sweep["lds_chosen_by"] = [correlations[choosing].mean() for correlations in each]
    sweep["lds_reported"] = [correlations[reporting].mean() for correlations in each]
    sweep["lds"] = [correlations.mean() for correlations in each]
    settings = list(swept)
    shown = [int(sweep["lds_chosen_by"].argmax()), settings.index(own)]
    sums = [swept[settings[row]][:, reporting] for row in shown]
    intervals = percentiles(bootstrap(sums, truth.outputs[:, :, reporting]), CONFIDENCE)
    best = sweep.iloc[shown].drop(columns="lds")
    best.insert(0, "setting", ["best", "config"])
    best[["low", "high"]] = intervals[:2]
    return sweep, best.reset_index(drop=True)

"""What becomes of targets when their most helpful training samples go, or as many random ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import COUNTERFACTUAL, RETRAINED, check_same, create, open_artifact
from trak_core.stages.software import software
from trak_core.subsets import random_removals, top_removals

CONFIDENCE = 0.95
_N_DRAWS = 1000


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Return the bootstrap interval of a mean over targets."""
    drawn = np.random.default_rng(0).integers(len(values), size=(_N_DRAWS, len(values)))
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values[drawn].mean(axis=1), [outside, 1 - outside])
    return float(low), float(high)


def _models(
    path: Path, targets: Sequence[Any], seeds: int, expected: dict[str, Any], rule: str
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return outputs and predictions, each (subsets, seeds, targets), and the file's hash."""
    with open_artifact(path, replace(RETRAINED, rule=rule)) as file:
        found = {key: file.spec.get(key) for key in expected}
        check_same("settings of today's config", expected, found, path, rule)
        column = {target: i for i, target in enumerate(file.columns("outputs"))}
        columns = [column[target] for target in targets]
        outputs, predictions = (
            file.matrix(key)[:][:, columns].reshape(-1, seeds, len(columns))
            for key in ("outputs", "predictions")
        )
        return outputs, predictions, file.content_hash


def _mean_row(
    table: pd.DataFrame, removed: str, size: int, quantities: Sequence[str]
) -> dict[str, Any]:
    """Return means over targets, and the interval of the mean change."""
    rows = (table["removed"] == removed) & (table["n_removed"] == size)
    own = {key: table[key].to_numpy()[rows.to_numpy()] for key in quantities}
    low, high = _interval(own["change"])
    means = {key: float(values.mean()) for key, values in own.items()}
    return {"removed": removed, "n_removed": size, **means, "low": low, "high": high}


def compare_removals(
    *,
    counterfactual: Path,
    random: Path,
    top: Sequence[Path],
    groups: Sequence[Sequence[Any]],
    n_removed: Sequence[int],
    draws: int,
    seeds: int,
    spec: dict[str, Any],
    code: str,
) -> None:
    """Put models without some samples beside those of the same seed that saw everything.

    Args:
        counterfactual: The file to write; ``docs/evaluation.md`` describes its tables.
        random: Models trained on everything, and without random samples.
        top: Models without the most helpful samples of some targets, a file a group.
        groups: Ids of each group's targets.
        n_removed: How many samples were to go.
        draws: Random removals of each number.
        seeds: Trainings on each subset.
        spec: What decides the numbers, and was to decide the models'.
        code: The stage's code digest.

    Raises:
        ArtifactError: If the models were made for another config.
    """
    targets = [target for group in groups for target in group]
    shared = {key: spec[key] for key in ("n_removed", "seeds", "seed", "arguments", "model_output")}
    shared["study"] = spec["study_digest"]
    outputs, predictions, hash_ = _models(
        random, targets, seeds, {**shared, "draws": draws}, "retrain_at_random"
    )
    hashes = [hash_]
    is_class = predictions.dtype.kind != "f"
    everything = outputs[0].mean(axis=0)
    rows: list[dict[str, Any]] = []

    def note(removed: str, size: int, j: int, values: np.ndarray, predicted: np.ndarray) -> None:
        """Add the row of a target: values and classes of models (removals, seeds)."""
        row = {
            "removed": removed,
            "n_removed": size,
            "target_id": targets[j],
            "output": float(everything[j]),
            "change": float((values - outputs[0][:, j]).mean(dtype=np.float64)),
        }
        if is_class:
            row["flips"] = float((predicted != predictions[0][:, j]).mean())
        rows.append(row)

    first = 0
    for path, group in zip(top, groups, strict=True):
        values, predicted, hash_ = _models(
            path, targets, seeds, {**shared, "targets": list(group)}, "retrain_without_top"
        )
        hashes.append(hash_)
        for i, (target, size) in enumerate(top_removals(group, n_removed)):
            j = first + list(group).index(target)
            note("top", size, j, values[i, :, j], predicted[i, :, j])
        first += len(group)
    sizes = random_removals(n_removed, draws)
    for size in n_removed:
        which = [i + 1 for i, (found, _) in enumerate(sizes) if found == size]
        for j in range(len(targets)):
            note("random", size, j, outputs[which, :, j], predictions[which, :, j])
    table = pd.DataFrame(rows)
    quantities = ["change", "flips"] if is_class else ["change"]
    summary = pd.DataFrame([
        _mean_row(table, removed, size, quantities)
        for removed in ("top", "random")
        for size in n_removed
    ])
    provenance = software(code, "cpu", "numpy", "pandas")
    spec = {**spec, "retrained": hashes}
    with create(counterfactual, COUNTERFACTUAL, spec, provenance, confidence=CONFIDENCE) as writer:
        writer.table("summary", summary, [])
        writer.table("targets", table, ["target_id"])
    print(summary.to_string(index=False))

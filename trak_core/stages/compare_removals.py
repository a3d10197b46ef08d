"""Compare models without the most helpful training samples with models without random ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import REMOVALS, RETRAINED, SCORES, check_retrained, create, open_artifact
from trak_core.evaluation.retrained_lists import CONFIDENCE, mean_interval
from trak_core.spec import RetrainedSpec
from trak_core.study.retraining_draws import random_removals, top_removals
from trak_core.system.progress import software

# What a removal did, (seeds, targets): `change` of f, and `flips`, parts of flipped predictions,
# where predictions are classes.
_Effects = dict[str, np.ndarray]


def _models(
    path: Path, explained: Sequence[Any], spec: RetrainedSpec, rule: str, **more: Any
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return outputs and predictions, each (subsets, seeds, targets), and the file's hash."""
    with open_artifact(path, replace(RETRAINED, rule=rule)) as file:
        check_retrained(file, spec, rule, **more)
        column = {target: i for i, target in enumerate(file.columns("outputs"))}
        columns = [column[target] for target in explained]
        outputs, predictions = (
            file.matrix(key)[:][:, columns].reshape(-1, spec.seeds, len(columns))
            for key in ("outputs", "predictions")
        )
        return outputs, predictions, file.content_hash


def _effects(models: Sequence[np.ndarray], everything: Sequence[np.ndarray]) -> _Effects:
    """Compare models (draws, seeds, targets) with those of the same seed that saw everything."""
    outputs, predictions = models
    effects = {"change": (outputs.astype(np.float64) - everything[0]).mean(axis=0)}
    if predictions.dtype.kind != "f":
        effects["flips"] = (predictions != everything[1]).mean(axis=0)
    return effects


def _summary(effects: _Effects) -> dict[str, float]:
    """Return means, and the interval of the mean change."""
    low, high = mean_interval(effects["change"])
    means = {key: float(values.mean()) for key, values in effects.items()}
    return means | {"low": low, "high": high}


def _without_top(
    top: Sequence[Path], groups: Sequence[Sequence[Any]], spec: RetrainedSpec, scores_hash: str
) -> tuple[dict[int, list[np.ndarray]], list[str]]:
    """Return outputs and predictions, (1, seeds, targets), by size, and the files' hashes."""
    targets = [target for group in groups for target in group]
    parts: dict[int, list[list[np.ndarray]]] = {size: [] for size in spec.n_removed}
    hashes = []
    for path, group in zip(top, groups, strict=True):
        about = {"scores": scores_hash, "targets": list(group)}
        *models, hash_ = _models(path, targets, spec, "retrain_without_top", **about)
        hashes.append(hash_)
        for i, (target, size) in enumerate(top_removals(group, spec.n_removed)):
            j = targets.index(target)
            parts[size].append([values[i : i + 1, :, j : j + 1] for values in models])
    joined = {
        size: [np.concatenate(values, axis=2) for values in zip(*of_size, strict=True)]
        for size, of_size in parts.items()
    }
    return joined, hashes


def compare_removals(
    *,
    removals: Path,
    scores: Path,
    random: Path,
    top: Sequence[Path],
    groups: Sequence[Sequence[Any]],
    spec: RetrainedSpec,
    code: str,
) -> None:
    """Put models without some samples beside those of the same seed that saw everything.

    ``random`` are models trained on everything and without random samples; ``top`` those without
    the samples that ``scores`` call most helpful for a group of targets, a file for each of
    ``groups``. Except for its draws ``spec`` decides both kinds.
    ``docs/reference/evaluation-files.md`` describes the tables.
    """
    targets = [target for group in groups for target in group]
    outputs, predictions, hash_ = _models(random, targets, spec, "retrain_without_random")
    everything = outputs[0], predictions[0]
    with open_artifact(scores, SCORES) as file:
        scores_hash = file.content_hash
    top_spec = replace(spec, subsets="top removals", draws=0)
    without, hashes = _without_top(top, groups, top_spec, scores_hash)
    sizes = random_removals(spec.n_removed, spec.draws)
    effects: dict[tuple[str, int], _Effects] = {}
    for size in spec.n_removed:
        drawn = [i + 1 for i, (n, _) in enumerate(sizes) if n == size]
        own = _effects(without[size], everything)
        chance = _effects([outputs[drawn], predictions[drawn]], everything)
        # The models that saw everything cancel.
        beyond = {key: own[key] - chance[key] for key in own}
        effects |= {("top", size): own, ("random", size): chance, ("difference", size): beyond}
    summary = pd.DataFrame([
        {"removed": removed, "n_removed": size, **_summary(effects[removed, size])}
        for removed in ("top", "random", "difference")
        for size in spec.n_removed
    ])
    about = {"target_id": targets, "output": outputs[0].mean(axis=0, dtype=np.float64)}
    tables = []
    for removed in ("top", "random"):
        for size in spec.n_removed:
            means = {key: values.mean(axis=0) for key, values in effects[removed, size].items()}
            columns = {"removed": removed, "n_removed": size, **about, **means}
            tables.append(pd.DataFrame(columns))
    table = pd.concat(tables, ignore_index=True)
    provenance = software(code, "cpu", "numpy", "pandas")
    file_spec = spec.as_dict() | {"scores": scores_hash, "retrained": [hash_, *hashes]}
    with create(removals, REMOVALS, file_spec, provenance, confidence=CONFIDENCE) as writer:
        writer.table("summary", summary, [])
        writer.table("targets", table, ["target_id"])
    print(summary.to_string(index=False))

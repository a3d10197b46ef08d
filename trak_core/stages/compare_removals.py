"""Compare models without the most helpful training samples with models without random ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from trak_core.artifacts import REMOVALS, RETRAINED, SCORES, check_retrained, create, open_artifact
from trak_core.spec import RetrainedSpec
from trak_core.study.draws import random_removals, top_removals
from trak_core.system.progress import software

CONFIDENCE = 0.95
_N_DRAWS = 1000


def mean_interval(changes: np.ndarray) -> tuple[float, float]:
    """Return the bootstrap interval of a mean over trainings and targets.

    ``changes`` has shape (seeds, targets). Both are drawn anew, because all targets share the
    models that saw everything, and what these have by chance must not look like an effect.

    Returns:
        Ends of the percentile interval.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    random = np.random.default_rng(0)
    seeds, targets = (random.integers(n, size=(_N_DRAWS, n)) for n in changes.shape)
    means = changes[seeds[:, :, None], targets[:, None, :]].mean(axis=(1, 2))
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [outside, 1 - outside])
    return float(low), float(high)


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


@dataclass(frozen=True, slots=True)
class _Removal:
    """What a removal did: changes of f, and parts of flipped predictions, (seeds, targets)."""

    change: np.ndarray
    flips: np.ndarray | None

    @classmethod
    def of(
        cls, outputs: np.ndarray, predictions: np.ndarray, everything: Sequence[np.ndarray]
    ) -> Self:
        """Compare models (draws, seeds, targets) with those of the same seed that saw all."""
        flips = None
        if predictions.dtype.kind != "f":
            flips = (predictions != everything[1]).mean(axis=0)
        return cls((outputs.astype(np.float64) - everything[0]).mean(axis=0), flips)

    def beyond(self, other: Self) -> Self:
        """Return what it did more than another removal; the models that saw all cancel."""
        flips = None
        if self.flips is not None and other.flips is not None:
            flips = self.flips - other.flips
        return replace(self, change=self.change - other.change, flips=flips)

    def row(self) -> dict[str, float]:
        """Return means, and the interval of the mean change."""
        low, high = mean_interval(self.change)
        flips = {} if self.flips is None else {"flips": float(self.flips.mean())}
        return {"change": float(self.change.mean()), **flips, "low": low, "high": high}

    def targets(self) -> dict[str, np.ndarray]:
        """Return each target's means over trainings."""
        flips = {} if self.flips is None else {"flips": self.flips.mean(axis=0)}
        return {"change": self.change.mean(axis=0), **flips}


def _without_top(
    top: Sequence[Path], groups: Sequence[Sequence[Any]], spec: RetrainedSpec, scores_hash: str
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Return outputs and predictions, (1, seeds, targets), by size, and the files' hashes."""
    targets = [target for group in groups for target in group]
    parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {size: [] for size in spec.n_removed}
    hashes = []
    for path, group in zip(top, groups, strict=True):
        about = {"scores": scores_hash, "targets": list(group)}
        *models, hash_ = _models(path, targets, spec, "retrain_without_top", **about)
        hashes.append(hash_)
        for i, (target, size) in enumerate(top_removals(group, spec.n_removed)):
            j = targets.index(target)
            outputs, predictions = (values[i : i + 1, :, j : j + 1] for values in models)
            parts[size].append((outputs, predictions))
    joined = {
        size: (
            np.concatenate([outputs for outputs, _ in of_size], axis=2),
            np.concatenate([predictions for _, predictions in of_size], axis=2),
        )
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
    ``groups``. Except for its draws ``spec`` decides both kinds. ``docs/evaluation.md`` describes
    the tables.
    """
    targets = [target for group in groups for target in group]
    outputs, predictions, hash_ = _models(random, targets, spec, "retrain_without_random")
    everything = outputs[0], predictions[0]
    with open_artifact(scores, SCORES) as file:
        scores_hash = file.content_hash
    top_spec = replace(spec, subsets="top removals", draws=0)
    without, hashes = _without_top(top, groups, top_spec, scores_hash)
    sizes = random_removals(spec.n_removed, spec.draws)
    done = {}
    for size in spec.n_removed:
        drawn = [i + 1 for i, (n, _) in enumerate(sizes) if n == size]
        done["random", size] = _Removal.of(outputs[drawn], predictions[drawn], everything)
        done["top", size] = _Removal.of(*without[size], everything)
        done["difference", size] = done["top", size].beyond(done["random", size])
    summary = pd.DataFrame([
        {"removed": removed, "n_removed": size, **done[removed, size].row()}
        for removed in ("top", "random", "difference")
        for size in spec.n_removed
    ])
    about = {"target_id": targets, "output": outputs[0].mean(axis=0, dtype=np.float64)}
    table = pd.concat(
        [
            pd.DataFrame({
                "removed": removed,
                "n_removed": size,
                **about,
                **done[removed, size].targets(),
            })
            for removed in ("top", "random")
            for size in spec.n_removed
        ],
        ignore_index=True,
    )
    provenance = software(code, "cpu", "numpy", "pandas")
    file_spec = spec.as_dict() | {"scores": scores_hash, "retrained": [hash_, *hashes]}
    with create(removals, REMOVALS, file_spec, provenance, confidence=CONFIDENCE) as writer:
        writer.table("summary", summary, [])
        writer.table("targets", table, ["target_id"])
    print(summary.to_string(index=False))

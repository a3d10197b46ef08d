"""Put the scores of two runs side by side: rank correlations, and how many of the largest agree."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import COMPARISON, SCORES, Artifact, create, open_artifact
from trak_core.errors import InputError
from trak_core.system.software import software
from trak_core.trust.correlations import rank_correlations, top_overlap

_MEANS = ("rank_correlation", "overlap_positive", "overlap_negative")


_BLOCK_BYTES = 2**28


def _places(file: Artifact, like: Artifact) -> list[np.ndarray]:
    """Return where another file's rows and columns stand in this one."""
    found = []
    for what, own, wanted in (
        ("training samples", file.index("scores"), like.index("scores")),
        ("targets", file.columns("scores"), like.columns("scores")),
    ):
        position = {sample: i for i, sample in enumerate(own)}
        if position.keys() != set(wanted):
            raise InputError(
                f"{file.path}: runs to be compared must have the same {what}. Found {len(own)}, "
                f"such as {own[0]}; in {like.path} {len(wanted)}, such as {wanted[0]}."
            )
        found.append(np.array([position[sample] for sample in wanted]))
    return found


def _blocks(ours: Artifact, theirs: Artifact) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield some targets' scores in both files at a time, in the order of the first, float64."""
    a, b = (file.matrix("scores") for file in (ours, theirs))
    rows, columns = _places(theirs, ours)
    n_train, n_targets = a.shape
    # Ranking takes some hundred bytes a score.
    block = max(1, _BLOCK_BYTES // (100 * n_train))
    for start in range(0, n_targets, block):
        # HDF5 reads columns in their own order.
        own, place = np.unique(columns[start : start + block], return_inverse=True)
        yield (
            a[:, start : start + block].astype(np.float64),
            b[:, own][np.ix_(rows, place)].astype(np.float64),
        )


def compare_runs(
    *, comparison: Path, runs: Mapping[str, tuple[Path, Path]], top: int, code: str
) -> None:
    """Compare each target's scores of one run with those of another.

    Args:
        comparison: The file to write; ``docs/evaluation.md`` describes its tables.
        runs: Of each experiment, the scores of both runs.
        top: How many of the largest scores, and of the smallest, to look for in both.
        code: The stage's code digest.

    Raises:
        InputError: If the two are not about the same samples, or kept only top influences.
    """
    tables: list[pd.DataFrame] = []
    means: list[dict[str, Any]] = []
    hashes: dict[str, list[str]] = {}
    for experiment, paths in runs.items():
        with open_artifact(paths[0], SCORES) as ours, open_artifact(paths[1], SCORES) as theirs:
            for file in (ours, theirs):
                if not file.has("scores"):
                    raise InputError(
                        f"{file.path}: runs to be compared must have kept all scores. Found top "
                        "influences only. Set scoring.keep to full."
                    )
            found = [
                (rank_correlations(a, b), top_overlap(a, b, top), top_overlap(-a, -b, top))
                for a, b in _blocks(ours, theirs)
            ]
            correlations, positive, negative = map(np.concatenate, zip(*found, strict=True))
            hashes[experiment] = [ours.content_hash, theirs.content_hash]
            tables.append(
                pd.DataFrame({
                    "experiment": experiment,
                    "target_id": ours.columns("scores"),
                    "rank_correlation": correlations,
                    "overlap_positive": positive,
                    "overlap_negative": negative,
                })
            )
        mean = {key: np.mean(tables[-1][key].to_numpy()) for key in _MEANS}
        means.append({"experiment": experiment, "n_targets": len(correlations), **mean})
    targets = pd.concat(tables, ignore_index=True)
    experiments = pd.DataFrame(means)
    spec = {"scores": hashes, "top": top}
    with create(comparison, COMPARISON, spec, software(code, "cpu", "numpy", "pandas")) as writer:
        writer.table("experiments", experiments, [])
        writer.table("targets", targets, ["experiment", "target_id"])
    print(experiments.to_string(index=False))

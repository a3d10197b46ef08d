"""What the report is told, read from the artifacts of a study."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    DISTORTION,
    EVALUATION,
    FLIPPED,
    NORMAL_MATRIX,
    REMOVALS,
    SCORES,
    SELF_INFLUENCE,
    Artifact,
    ArtifactKind,
    open_artifact,
)
from trak_core.report.facts import Distortion, Error, Experiment, Matrix, Measured, Source
from trak_core.report.warnings import LIMITS

_ATTRIBUTES = ("n_subsets", "n_seeds", "n_targets", "confidence")
_LARGEST = 10


def _source(artifact: Artifact, results: Path) -> Source:
    name = artifact.path.relative_to(results).as_posix()
    return Source(name, artifact.content_hash, artifact.provenance, artifact.spec)


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def read_experiment(path: Path, results: Path, n_shown: int, each: int) -> Experiment:
    """Return an experiment's final scores: all targets, and the strongest influences on some.

    Args:
        path: Its scores.
        results: The results folder.
        n_shown: Targets whose influences are kept.
        each: Influences of either sign kept for each.

    Raises:
        ArtifactError: If the file is not what it must be, or of a version before the report.
    """
    with open_artifact(path, SCORES) as file:
        source = _source(file, results)
        targets, train = file.table("targets"), file.table("train")
        influences = file.table("top_influences")
        unit, defaults = file.attribute("unit"), file.attribute("defaults")
    shown = influences["target_id"].isin(targets["id"].head(n_shown))
    strongest: dict[tuple[Any, int], list[dict[str, Any]]] = defaultdict(list)
    for row in _rows(influences.loc[shown & (influences["rank"] <= each)]):
        strongest[row["target_id"], row["sign"]].append(row)
    return Experiment(
        name=source.spec["experiment"],
        source=source,
        unit=unit,
        n_train=len(train),
        saturated=float(np.mean(np.abs(train["loss_weight"].to_numpy()) < LIMITS["loss_weight"])),
        defaults=defaults,
        targets=_rows(targets),
        strongest=strongest,
        influential=influences["train_id"].unique().tolist(),
    )


def read_matrix(path: Path, results: Path) -> Matrix:
    """Return the ends of a normal matrix's spectrum."""
    with open_artifact(path, NORMAL_MATRIX) as file:
        return Matrix(
            file.spec["checkpoint"]["id"],
            _source(file, results),
            file.scalar("smallest_eigenvalue"),
            file.scalar("largest_eigenvalue"),
            file.scalar("mean_squared_norm"),
            int(file.scalar("n_train")),
        )


def read_distortion(path: Path, results: Path) -> Distortion:
    """Return what one checkpoint's distortion found."""
    with open_artifact(path, DISTORTION) as file:
        names = file.columns("agreement")
        errors = {
            kind: Error(**dict(zip(names, row, strict=True)))
            for kind, row in zip(
                file.index("agreement"), file.matrix("agreement")[:].tolist(), strict=True
            )
        }
        return Distortion(
            checkpoint=file.spec["checkpoint"]["id"],
            source=_source(file, results),
            n_samples=len(file.vector("sample_ids")),
            n_streams=file.attribute("n_streams"),
            **errors,
        )


def _measured(
    path: Path, kind: ArtifactKind, results: Path, *tables: str, **counts: int
) -> Measured:
    """Read the tables that a file has out of those asked for, and its numbers."""
    with open_artifact(path, kind) as file:
        source = _source(file, results)
        found = [key for key in tables if file.has(key)]
        numbers = {key: file.attribute(key) for key in _ATTRIBUTES if key in file.file.attrs}
        rows = {key: _rows(file.table(key)) for key in found}
    return Measured(source, rows, numbers | counts)


def read_evaluation(path: Path, results: Path) -> Measured:
    """Return an experiment's LDS."""
    tables = "summary", "targets", "checkpoints", "sweep", "best"
    return _measured(path, EVALUATION, results, *tables)


def read_removals(path: Path, results: Path) -> Measured:
    """Return what became of an experiment's targets without their most helpful samples."""
    return _measured(path, REMOVALS, results, "summary")


def read_flipped(path: Path, results: Path) -> Measured:
    """Return how well wrong labels were found."""
    with open_artifact(path, FLIPPED) as file:
        flipped = int(file.table("train")["flipped"].to_numpy().sum())
    return _measured(path, FLIPPED, results, "detection", n_flipped=flipped)


def read_self_influence(path: Path, results: Path) -> Measured:
    """Return the training samples with the largest self-influence, whatever its sign."""
    with open_artifact(path, SELF_INFLUENCE) as file:
        source, train = _source(file, results), file.table("train")
    by_size = train.sort_values("self_influence", key=np.abs, ascending=False, kind="stable")
    largest = by_size.head(_LARGEST)
    return Measured(source, {"largest": _rows(largest)}, {})

"""Whether files of one study belong together: two splits of one checkpoint, or all checkpoints."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trak_core.artifacts._format import Kind
from trak_core.artifacts._join import check_made_for, check_same
from trak_core.artifacts._read import Artifact
from trak_core.spec import ScoresSpec

# What one checkpoint's files of both splits must share.
_SHARED = (
    *("projection", "parameters_digest", "parameter_patterns", "model_output", "checkpoint"),
    *("dtype", "study_digest"),
)


def check_splits(
    train: Artifact, targets: Artifact, spec: ScoresSpec, kind: Kind
) -> dict[str, Any]:
    """Refuse files that were made for another config, or that don't belong together.

    Args:
        train: Of the training samples.
        targets: Of an experiment's targets.
        spec: Of one checkpoint's scores.
        kind: Of both files.

    Returns:
        What both say of themselves, for the specification of the scores.

    Raises:
        ArtifactError: If they may not be combined.
    """
    check_made_for(train, spec.of_train(), kind.rule)
    check_made_for(targets, spec.of_targets(), kind.rule)
    shared = {key: train.spec.get(key) for key in _SHARED}
    found = {key: targets.spec.get(key) for key in _SHARED}
    check_same("specification of both splits", shared, found, targets.path, kind.rule)
    return shared


def check_together(parts: Sequence[Artifact], spec: ScoresSpec, kind: Kind) -> None:
    """Refuse score files of different experiments, settings, samples or checkpoints.

    Args:
        parts: One file a checkpoint.
        spec: Of their average; the files are in the order of its checkpoints.
        kind: Of all files.

    Raises:
        ArtifactError: If they may not be combined.
    """
    for part, checkpoint in zip(parts, spec.checkpoints, strict=True):
        check_made_for(part, spec.under(checkpoint), kind.rule)
        first, found = (one.spec.get("parameters_digest") for one in (parts[0], part))
        check_same("names and shapes of parameters", first, found, part.path, kind.rule)
        first, found = (_without_stream(one.spec["projection"]) for one in (parts[0], part))
        check_same("projection", first, found, part.path, kind.rule)
        # Labels too: the study's data files may have changed between two checkpoints' jobs.
        for key in ("train_ids", "target_ids", "train_labels", "target_labels"):
            if not np.array_equal(parts[0].vector(key), part.vector(key)):
                both = parts[0].ids(key), part.ids(key)
                check_same(key.replace("_", " "), *both, part.path, kind.rule)


def _without_stream(projection: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in projection.items() if key != "stream"}

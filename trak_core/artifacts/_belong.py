"""Whether files of one study belong together: two splits of one checkpoint, or all checkpoints."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trak_core.artifacts._join import check_made_for, check_same
from trak_core.artifacts._read import Artifact

# What one checkpoint's files of both splits must share.
_SHARED = (
    *("projection", "parameters", "parameter_patterns", "model_output", "checkpoint"),
    *("dtype", "study"),
)


def check_splits(
    train: Artifact, targets: Artifact, expected: dict[str, Any], rule: str
) -> dict[str, Any]:
    """Refuse files that were made for another config, or that don't belong together.

    Args:
        train: Of the training samples.
        targets: Of an experiment's targets.
        expected: See ``check_made_for``; its split is the experiment.
        rule: The rule that makes such files.

    Returns:
        What both say of themselves, for the specification of the scores.

    Raises:
        ArtifactError: If they may not be combined.
    """
    check_made_for(train, {**expected, "split": "train", "targets_digest": None}, rule)
    check_made_for(targets, expected, rule)
    shared = {key: train.spec.get(key) for key in _SHARED}
    found = {key: targets.spec.get(key) for key in _SHARED}
    check_same("specification of both splits", shared, found, targets.path, rule)
    return shared


def check_together(parts: Sequence[Artifact], expected: dict[str, Any], rule: str) -> None:
    """Refuse score files of different experiments, settings, samples or checkpoints.

    Args:
        parts: One file a checkpoint.
        expected: See ``check_made_for``; and checkpoints: their ids, in the files' order.
        rule: The rule that makes such files.

    Raises:
        ArtifactError: If they may not be combined.
    """
    settings = {key: value for key, value in expected.items() if key != "checkpoints"}
    for part, checkpoint in zip(parts, expected["checkpoints"], strict=True):
        check_made_for(part, {**settings, "checkpoint": checkpoint}, rule)
        first, found = parts[0].spec.get("parameters"), part.spec.get("parameters")
        check_same("names and shapes of parameters", first, found, part.path, rule)
        matrix = {k: v for k, v in part.spec["projection"].items() if k != "stream"}
        first = {k: v for k, v in parts[0].spec["projection"].items() if k != "stream"}
        check_same("projection", first, matrix, part.path, rule)
        # Labels too: the study's data files may have changed between two checkpoints' jobs.
        for key in ("train_ids", "target_ids", "train_labels", "target_labels"):
            if not np.array_equal(parts[0].vector(key), part.vector(key)):
                both = parts[0].ids(key), part.ids(key)
                check_same(key.replace("_", " "), *both, part.path, rule)

"""Training samples and targets under one checkpoint: two files, and what scores take from both."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trak_core.artifacts import Artifact, Writer, check_made_for, check_same
from trak_core.errors import InputError
from trak_core.spec import Weighting

# What one checkpoint's files of both splits must share.
_SHARED = (
    *("projection", "parameters", "parameter_patterns", "model_output", "checkpoint"),
    *("dtype", "study"),
)
_PER_SAMPLE = ("labels", "outputs", "predictions")


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


def normal_weights(train: Artifact, weighting: str) -> np.ndarray:
    """Return the diagonal of W: ones, or the curvature of the training samples' loss.

    Raises:
        InputError: If the file holds no curvature where that is asked for.
    """
    if Weighting(weighting) is Weighting.PLAIN:
        return np.ones(len(train.vector("sample_ids")))
    if not train.has("curvature"):
        raise InputError(
            f"{train.path}: training samples weighted by `curvature` must come with the curvature "
            f"of their loss. The model output {train.spec['model_output']} has none; set "
            "scoring.normal_matrix to plain."
        )
    return train.vector("curvature")


def write_samples(writer: Writer, train: Artifact, targets: Artifact) -> None:
    """Write ids and what the checkpoint makes of every sample, and the loss weights."""
    writer.vector("loss_weights", train.vector("loss_weights"))
    for side, file in (("train", train), ("target", targets)):
        writer.vector(f"{side}_ids", file.ids("sample_ids"))
        for key in _PER_SAMPLE:
            writer.vector(f"{side}_{key}", file.vector(key))

"""Refuse files that don't belong together, or that were made for another config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts.format import TARGETS, ArtifactError
from trak_core.artifacts.read import Artifact, open_artifact
from trak_core.spec import FeaturesSpec, RetrainedSpec, ScoresSpec

# What one checkpoint's files of both splits must share.
_SHARED = ("projection", "parameters_digest", "parameter_patterns", "model_output", "checkpoint")
_SHARED += ("dtype", "study_digest")


def check_same(part: str, expected: Any, own: Any, file: Artifact) -> None:
    """Refuse a file that differs from the config, or from a file it will be combined with.

    ``part`` names what is compared, ``own`` its value in the file. Dicts are compared key by key.
    """
    if expected == own:
        return
    if isinstance(expected, dict) and isinstance(own, dict):
        keys = sorted(k for k in expected.keys() | own.keys() if expected.get(k) != own.get(k))
        expected, own = ({k: spec.get(k) for k in keys} for spec in (expected, own))
    texts = [text if len(text) <= 200 else f"{text[:200]}..." for text in (str(expected), str(own))]
    raise ArtifactError(
        f"{file.path}: files to be combined must agree in the {part}. Expected {texts[0]}, found "
        f"{texts[1]}. Delete the file and run snakemake again: rule {file.kind.rule} remakes it."
    )


def check_made_for(artifact: Artifact, spec: FeaturesSpec | ScoresSpec) -> None:
    """Refuse a file that was made for another config than today's.

    An orphaned job may leave a complete file that Snakemake knows nothing about; only the file
    itself says what it is. Its projection is compared in the config's keys, its checkpoint by id.
    """
    shard = artifact.spec.get("shard")
    check_same("rows: the whole split", None, shard, artifact)
    check_same("settings of today's config", *made_for(artifact, spec), artifact)


def made_for(
    artifact: Artifact, spec: FeaturesSpec | ScoresSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a file's specification must be for a config, and what it is, by key."""
    own, expected = artifact.spec, spec.as_dict()
    own = {key: own.get(key) for key in expected} | {"projection": own.get("projection")}
    if isinstance(own["projection"], dict):
        own["projection"] = {key: own["projection"].get(key) for key in expected["projection"]}
    if isinstance(own["checkpoint"], dict):
        own["checkpoint"] = own["checkpoint"].get("id")
    return expected, own


def check_retrained(artifact: Artifact, spec: RetrainedSpec, **more: Any) -> None:
    """Refuse models retrained for another config than today's, or that lack a key of ``more``."""
    expected = spec.as_dict() | more
    own = {key: artifact.spec.get(key) for key in expected}
    check_same("settings of today's config", expected, own, artifact)


def selected_ids(paths: Sequence[Path], spec: FeaturesSpec) -> list[Any] | None:
    """Return the ids of selected targets, of one file at most; None without one.

    They must have been selected by the description that ``spec`` is made for.
    """
    for path in paths:
        with open_artifact(path, TARGETS) as file:
            digest = file.spec.get("targets_digest")
            check_same("description of targets", spec.targets_digest, digest, file)
            return file.table("targets")["id"].tolist()
    return None


def check_splits(train: Artifact, targets: Artifact, spec: ScoresSpec) -> dict[str, Any]:
    """Return what both splits' specifications share, for the scores' own; refuse other files."""
    check_made_for(train, spec.of_train())
    check_made_for(targets, spec.of_targets())
    shared, own = ({key: file.spec.get(key) for key in _SHARED} for file in (train, targets))
    check_same("specification of both splits", shared, own, targets)
    return shared


def check_together(parts: Sequence[Artifact], spec: ScoresSpec) -> None:
    """Refuse score files of different experiments, settings, samples or checkpoints.

    There is a file for each checkpoint, in the order of ``spec.checkpoints``.
    """
    first = parts[0]
    for part, checkpoint in zip(parts, spec.checkpoints, strict=True):
        check_made_for(part, spec.under(checkpoint))
        expected, own = (file.spec.get("parameters_digest") for file in (first, part))
        check_same("names and shapes of parameters", expected, own, part)
        # Each checkpoint has a stream of its own.
        expected, own = (file.spec["projection"] | {"stream": None} for file in (first, part))
        check_same("projection", expected, own, part)
        # Labels too: the study's data files may have changed between two checkpoints' jobs.
        for key in ("train_ids", "target_ids", "train_labels", "target_labels"):
            if not np.array_equal(first.vector(key), part.vector(key)):
                check_same(key.replace("_", " "), first.ids(key), part.ids(key), part)

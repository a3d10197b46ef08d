"""Raise an error for files that do not belong together or were written for another config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts.format import TARGETS, ArtifactError
from trak_core.artifacts.read import Artifact, open_artifact
from trak_core.settings import FeaturesSpec, RetrainedSpec, ScoresSpec

# For each checkpoint, the file of training samples and the file of targets must have the same
# values for these keys of ``spec``.
_SHARED = ("projection", "parameters_digest", "parameter_patterns", "model_output", "checkpoint")
_SHARED += ("dtype", "study_digest")


def check_same(part: str, expected: Any, actual: Any, file: Artifact) -> None:
    """Raise an error if the value ``actual`` in a file differs from ``expected``.

    ``part`` is the name of the value in the error message. If both values are dicts, the message
    shows only the entries that differ.
    """
    if expected == actual:
        return
    if isinstance(expected, dict) and isinstance(actual, dict):
        union = expected.keys() | actual.keys()
        keys = sorted(key for key in union if expected.get(key) != actual.get(key))
        expected, actual = ({key: spec.get(key) for key in keys} for spec in (expected, actual))
    raise ArtifactError(
        f"{file.path}: files that are used together must agree on the {part}. Expected "
        f"{str(expected)[:200]}, found {str(actual)[:200]}. Delete the file and run snakemake "
        f"again, so that rule {file.kind.rule} remakes it.",
        code="artifacts.other_file",
    )


def check_made_for(
    artifact: Artifact, spec: FeaturesSpec | ScoresSpec, *, may_be_shard: bool = False
) -> None:
    """Raise an error if an artifact was written for another config.

    Snakemake does not notice this if the job that wrote the file ended after Snakemake itself. A
    shard, which contains only some of the samples, also raises an error unless ``may_be_shard``.
    """
    if not may_be_shard:
        check_same("shard (None for a whole split)", None, artifact.spec.get("shard"), artifact)
    # Keys that the spec leaves out are also compared, because a file with such a key was written
    # for other settings.
    expected: dict[str, Any] = dict.fromkeys(FeaturesSpec.LEFT_OUT) | spec.as_dict()
    actual = {key: artifact.spec.get(key) for key in expected}
    if isinstance(actual["projection"], dict):
        actual["projection"] = {k: actual["projection"].get(k) for k in expected["projection"]}
    if isinstance(actual["checkpoint"], dict):
        actual["checkpoint"] = actual["checkpoint"].get("id")
    check_same("settings of the current config", expected, actual, artifact)


def check_retrained(artifact: Artifact, spec: RetrainedSpec, **more: Any) -> None:
    """Raise an error if a file of retrained models was written for other settings."""
    expected = spec.as_dict() | more
    actual = {key: artifact.spec.get(key) for key in expected}
    check_same("settings of the current config", expected, actual, artifact)


def selected_ids(paths: Sequence[Path], spec: FeaturesSpec) -> list[Any] | None:
    """Return the ids of the selected targets in the first file, or None if there is no file."""
    for path in paths:
        with open_artifact(path, TARGETS) as file:
            digest = file.spec.get("targets_digest")
            check_same("description of targets", spec.targets_digest, digest, file)
            return file.table("targets")["id"].tolist()
    return None


def check_splits(train: Artifact, targets: Artifact, spec: ScoresSpec) -> dict[str, Any]:
    """Return the settings that files of training samples and of targets must share.

    Raise an error if these settings, such as the projection, differ between the two files.
    """
    check_made_for(train, spec.of_train())
    check_made_for(targets, spec.of_targets())
    shared, actual = ({key: file.spec.get(key) for key in _SHARED} for file in (train, targets))
    check_same("specification of both splits", shared, actual, targets)
    return shared


def check_together(files: Sequence[Artifact], spec: ScoresSpec) -> None:
    """Raise an error if the score files of checkpoints cannot be averaged.

    All files must have the settings of ``spec`` and the same samples. ``files`` contains one file
    for each checkpoint, in the order of ``spec.checkpoints``.
    """
    first = files[0]
    for file, checkpoint in zip(files, spec.checkpoints, strict=True):
        check_made_for(file, spec.under(checkpoint))
        expected, actual = (f.spec.get("parameters_digest") for f in (first, file))
        check_same("names and shapes of parameters", expected, actual, file)
        # The stream of random numbers is different for each checkpoint, so it is not compared.
        expected, actual = (f.spec["projection"] | {"stream": None} for f in (first, file))
        check_same("projection", expected, actual, file)
        # The study's data files may have changed between the jobs of two checkpoints.
        for key in ("train_ids", "target_ids", "train_labels", "target_labels"):
            if not np.array_equal(first.vector(key), file.vector(key)):
                check_same(key.replace("_", " "), first.ids(key), file.ids(key), file)

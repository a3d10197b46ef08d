"""Check that files belong together and were written for the current config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts.format import TARGETS, ArtifactError
from trak_core.artifacts.read import Artifact, open_artifact
from trak_core.settings import FeaturesSpec, RetrainedSpec, ScoresSpec

# The keys of ``spec`` whose values must be equal in two files of a checkpoint: the file with the
# features of training samples, and the file with the features of targets.
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

    If Snakemake was killed before the job that wrote the file ended, Snakemake has no record of the
    job's params, and would use the file for any config.

    A shard, which contains only some of the samples, also raises an error unless ``may_be_shard``.
    """
    if not may_be_shard:
        check_same(
            "shard (None for a file of all samples)", None, artifact.spec.get("shard"), artifact
        )
    # ``as_dict`` omits some settings if they have their default values. A file that contains such a
    # setting was written with another value, so these settings are also compared.
    expected: dict[str, Any] = dict.fromkeys(FeaturesSpec.LEFT_OUT) | spec.as_dict()
    actual = {key: artifact.spec.get(key) for key in expected}
    if isinstance(actual["projection"], dict):
        actual["projection"] = {k: actual["projection"].get(k) for k in expected["projection"]}
    if isinstance(actual["checkpoint"], dict):
        actual["checkpoint"] = actual["checkpoint"].get("id")
    check_same("settings of the current config", expected, actual, artifact)


def check_retrained(artifact: Artifact, spec: RetrainedSpec, **more: Any) -> None:
    """Raise an error if a file of retrained models was written for other settings.

    ``more`` contains further entries that the file's ``spec`` must have.
    """
    expected = spec.as_dict() | more
    actual = {key: artifact.spec.get(key) for key in expected}
    check_same("settings of the current config", expected, actual, artifact)


def selected_ids(paths: Sequence[Path], spec: FeaturesSpec) -> list[Any] | None:
    """Return the ids of the targets that an experiment's ``where`` condition selected.

    ``paths`` contains the file with these ids. If the experiment has no condition, ``paths`` is
    empty, and None is returned.
    """
    for path in paths:
        with open_artifact(path, TARGETS) as file:
            digest = file.spec.get("targets_digest")
            check_same("description of targets", spec.targets_digest, digest, file)
            return file.table("targets")["id"].tolist()
    return None


def check_splits(train: Artifact, targets: Artifact, spec: ScoresSpec) -> dict[str, Any]:
    """Return the settings that determined the features of both training samples and targets.

    Raise an error if these settings, such as the projection, differ between the two files, or if a
    file was written for another config.
    """
    check_made_for(train, spec.of_train())
    check_made_for(targets, spec.of_targets())
    shared, actual = ({key: file.spec.get(key) for key in _SHARED} for file in (train, targets))
    check_same("settings of the gradients", shared, actual, targets)
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
        # Samples are compared because the study's data may have changed between the jobs of two
        # checkpoints.
        for key in ("train_ids", "target_ids", "train_labels", "target_labels"):
            if not np.array_equal(first.vector(key), file.vector(key)):
                check_same(key.replace("_", " "), first.ids(key), file.ids(key), file)

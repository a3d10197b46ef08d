"""Files that are to be combined must belong together."""

from pathlib import Path
from typing import Any

from trak_core.artifacts._format import ArtifactError
from trak_core.artifacts._read import Artifact


def check_same(what: str, expected: Any, found: Any, path: Path, rule: str) -> None:
    """Refuse a file that was not made for what it is about to be combined with.

    Args:
        what: The part of the specification compared, in words.
        expected: What the config or the other file says.
        found: What this file says.
        path: This file.
        rule: The rule that makes it.

    Raises:
        ArtifactError: If the two differ; dicts are compared key by key.
    """
    if expected == found:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        expected = {k: expected.get(k) for k in keys}
        found = {k: found.get(k) for k in keys}
    raise ArtifactError(
        f"{path}: files to be combined must agree in the {what}. Expected {_short(expected)}, "
        f"found {_short(found)}. Delete the file and run snakemake again: rule {rule} remakes it."
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_made_for(artifact: Artifact, expected: dict[str, Any], rule: str) -> None:
    """Refuse features, or scores of a checkpoint, that were made for another config than today's.

    An orphaned job may leave a complete file that Snakemake knows nothing about; only the file
    itself says what it is.

    Args:
        artifact: The open file.
        expected: From the config: projection (its keys there), dtype, model_output, study,
            parameter_patterns, checkpoint (id), targets_digest (None for the training samples);
            for features split, for scores experiment, weighting and damping.
        rule: The rule that makes such files.
    """
    spec = artifact.spec
    check_same("rows: the whole split", None, spec.get("shard"), artifact.path, rule)
    projection, checkpoint = spec.get("projection"), spec.get("checkpoint")
    if isinstance(projection, dict):
        projection = {key: projection.get(key) for key in expected["projection"]}
    found = {
        **{key: spec.get(key) for key in expected},
        "projection": projection,
        "checkpoint": checkpoint.get("id") if isinstance(checkpoint, dict) else checkpoint,
    }
    check_same("settings of today's config", expected, found, artifact.path, rule)

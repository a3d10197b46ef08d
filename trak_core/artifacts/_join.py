"""Files that are to be combined must belong together."""

from pathlib import Path
from typing import Any

from trak_core.artifacts._format import ArtifactError
from trak_core.artifacts._read import Artifact
from trak_core.spec import FeaturesSpec, RetrainedSpec, ScoresSpec


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


def check_made_for(artifact: Artifact, spec: FeaturesSpec | ScoresSpec, rule: str) -> None:
    """Refuse a file that was made for another config than today's.

    An orphaned job may leave a complete file that Snakemake knows nothing about; only the file
    itself says what it is.

    Args:
        artifact: The open file.
        spec: What the file must say of itself; of the projection the config's keys, of a checkpoint
            its id.
        rule: The rule that makes such files.

    Raises:
        ArtifactError: It names what differs.
    """
    found, expected = artifact.spec, spec.as_dict()
    check_same("rows: the whole split", None, found.get("shard"), artifact.path, rule)
    projection = found.get("projection")
    if isinstance(projection, dict):
        projection = {key: projection.get(key) for key in expected["projection"]}
    said = {key: found.get(key) for key in expected} | {"projection": projection}
    if isinstance(said["checkpoint"], dict):
        said["checkpoint"] = said["checkpoint"].get("id")
    check_same("settings of today's config", expected, said, artifact.path, rule)


def check_retrained(artifact: Artifact, spec: RetrainedSpec, rule: str, **more: Any) -> None:
    """Refuse models that were retrained for another config than today's.

    Args:
        artifact: The open file.
        spec: What it must say of itself.
        rule: The rule that makes it.
        **more: What else it must say.

    Raises:
        ArtifactError: It names what differs.
    """
    expected = spec.as_dict() | more
    found = {key: artifact.spec.get(key) for key in expected}
    check_same("settings of today's config", expected, found, artifact.path, rule)

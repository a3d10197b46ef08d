"""Digests of a study: what decides training, targets, or everything that is shown."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from trak_core.errors import InputError
from trak_core.provenance import content_digest, study_digest
from trak_core.system.files import file_digest

# The study's functions that are called to show samples alone, and for targets alone.
_SHOWING = {"draw", "describe"}
_TARGETS = {"target_data", "target_ids", "encode"}


def study_digests(study: Path, data_files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return hashes of a study's source and data files.

    Args:
        study: The study's Python file.
        data_files: Digests of the data files that the config names, by their paths.

    Returns:
        ``training``, of what decides trained checkpoints and features of training samples;
        ``targets``, which adds the functions called for targets; ``whole``, which adds those that
        draw and describe samples.

    Raises:
        InputError: See ``study_digest``.
    """
    return {
        "training": study_digest(study, data_files, _SHOWING | _TARGETS),
        "targets": study_digest(study, data_files, _SHOWING),
        "whole": study_digest(study, data_files),
    }


def targets_digest(
    ids: Sequence[int | str] | None, question: str | None, digests: Mapping[str, str]
) -> str:
    """Return the hash of target ids, and of the code and files that the targets come from.

    Args:
        ids: In order; None for all of a question's file.
        question: The file of an experiment that brings its own targets; None for the study's.
        digests: From ``study_digests``; without any, the ids alone count.

    Raises:
        InputError: If the question's file cannot be read.
    """
    if question is None:
        code = [digests.get("targets")]
    else:
        # A question in Python may import the study, and call anything there.
        decides = "whole" if question.endswith(".py") else "targets"
        code = [digests[decides], _content(question)]
    return content_digest(ids and [str(i) for i in ids], *code)


@cache
def _content(question: str) -> str:
    """Hash a question once: all jobs of a start are planned for what it said then."""
    path = Path(question)
    if not path.is_file():
        raise InputError(
            f"experiments: `data` must be a file. Found nothing at {question}.",
            code="config.missing_question",
        )
    return study_digest(path) if path.suffix == ".py" else file_digest(path)

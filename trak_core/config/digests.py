"""Which part of a study's source decides what, as hashes."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from trak_core.errors import InputError
from trak_core.provenance import content_digest, study_digest
from trak_core.system.files import file_digest

# The study's functions that jobs call for a thing; None for all.
_TRAIN_DATA = ("make_model", "train_data", "train_ids")
_CALLED = {
    "whole": None,
    "features": _TRAIN_DATA,
    "targets": (*_TRAIN_DATA, "target_data", "target_ids"),
    "questions": (*_TRAIN_DATA, "encode"),
    "training": (*_TRAIN_DATA, "train"),
    "retraining": (*_TRAIN_DATA, "train", "target_data", "target_ids"),
}


def study_digests(study: Path, data_files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return hashes of a study's source and data files.

    Args:
        study: The study's Python file.
        data_files: Digests of the data files that the config names, by their paths.

    Returns:
        ``whole``, and of what is reached by what jobs call for ``features`` of training samples,
        for ``targets``, ``questions``, ``training`` and ``retraining``.

    Raises:
        InputError: See ``study_digest``.
    """
    return {name: study_digest(study, data_files, called) for name, called in _CALLED.items()}


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
    elif question.endswith(".py"):
        # It may import the study.
        code = [digests["whole"], _content(question)]
    else:
        code = [digests["questions"], _content(question)]
    return content_digest(ids and [str(i) for i in ids], *code)


@cache
def _content(question: str) -> str:
    """Hash a question once: all jobs of a start are planned for what it said then."""
    path = Path(question)
    if not path.is_file():
        raise InputError(f"experiments: `data` must be a file. Found nothing at {question}.")
    return study_digest(path) if path.suffix == ".py" else file_digest(path)

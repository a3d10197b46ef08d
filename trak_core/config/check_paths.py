"""Refuse paths that a shell would read as more than that, and files that jobs could not import."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.model_outputs.table import output_name, place_of
from trak_core.provenance import study_modules

# Snakemake quotes paths on jobs' command lines, and executors of clusters wrap these once more for
# a shell. These signs end a quoted word, or count within one.
_SIGNS = "'\"`$\\\n\r"


def check_paths(config: Mapping[str, Any], others: Iterable[str]) -> None:
    """Refuse shell signs in every path of a config, in ``others`` and in the working folder.

    ``others`` are the config's own files and what its tables name.
    """
    for what, path in [
        *_paths(config),
        *(("a file", path) for path in others),
        ("the working folder", str(Path.cwd())),
    ]:
        found = next((sign for sign in path if sign in _SIGNS), None)
        if found is not None:
            raise InputError(
                f"Paths must be without signs that a shell reads: {' '.join(_SIGNS.split())}. Jobs "
                f"get them on a command line. Found {found!r} in {path!r}, {what}. Rename it, or "
                "give a link of another name.",
                code="config.shell_sign",
            )


def check_given(entries: Iterable[str]) -> None:
    """Refuse what ``--config`` says, if Snakemake would quote it for a shell so that parts run."""
    for entry in entries:
        found = next((sign for sign in entry if sign in "'\\\n\r"), None)
        if found is not None:
            raise InputError(
                "--config: on an executor of clusters, values must be without apostrophe, "
                f"backslash and ends of lines, because a shell reads them. Found {found!r} in "
                f"{entry!r}. Write it into a file, and name that by --configfile.",
                code="config.shell_value",
            )


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each path that a config says, with its key."""
    yield "study", config["study"]
    yield "model_output", output_name(config.get("model_output", ""))
    checkpoints = config["checkpoints"]
    if isinstance(checkpoints, str):
        yield "checkpoints", checkpoints
    elif "training" not in config:
        for name, entry in checkpoints.items():
            yield f"checkpoints.{name}", entry if isinstance(entry, str) else str(entry["path"])
    for name, experiment in config["experiments"].items():
        for key in ("targets", "data"):
            if isinstance(experiment.get(key), str):
                yield f"experiments.{name}.{key}", experiment[key]
    for file in config["data_files"]:
        yield "data_files", file
    truth = config.get("evaluation", {}).get("ground_truth")
    if truth is not None:
        yield "evaluation.ground_truth", truth
    if "conda" in config["compute"]:
        yield "compute.conda", config["compute"]["conda"]


def module_folders(question: Path, study: Path) -> list[Path]:
    """Return where a job that loads a study, then a question in Python, looks for modules."""
    return [question.parent, study.parent]


def python_modules(study: Path, questions: Sequence[Path]) -> list[Path]:
    """Return Python files and what they import beside them; refuse two that are one module."""
    named = study_modules(study)
    # A job finds a question's folder first, also for what the study imports.
    pairs = [(code, module_folders(path, study)) for path in questions for code in (study, path)]
    for name, file in (m for code, folders in pairs for m in study_modules(code, folders).items()):
        other = named.setdefault(name, file)
        if other.resolve() != file.resolve():
            raise InputError(
                "Python files of a study and its experiments, and what lies beside them, are "
                "modules of one process: each must have a name of its own. Found "
                f"{other} and {file}; rename one."
            )
    return [*named.values()]


def output_file(model_output: str | Mapping[str, str], study: Path) -> Path | None:
    """Return the file of a model output of the config's own, unless it is the study's."""
    place = place_of(output_name(model_output))
    if place is None or Path(place[0]).resolve() == study.resolve():
        return None
    if not Path(place[0]).is_file():
        raise InputError(
            f"model_output: the file of the function must exist. Found nothing at {place[0]} (from "
            f"{Path.cwd()}).",
            code="config.missing_output",
        )
    return Path(place[0])

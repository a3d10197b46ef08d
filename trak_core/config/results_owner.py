"""Check whether a results folder is from another config or study, or a copy of another folder."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from html import unescape
from logging import Logger
from pathlib import Path
from typing import Any

from trak_core.config.preflight import refuse_future
from trak_core.config.read_config import CONFIG_RECORD, record_config
from trak_core.errors import InputError
from trak_core.runtime.files import hold_results, read_record


def begin_run(config: Mapping[str, Any], results: Path, settings: Any) -> list[str]:
    """Lock and check the results folder of a run, and record the run's config in it.

    The folder must not contain results of another study, or files with a time in the future.

    Args:
        config: The run's config, with all defaults.
        results: The results folder.
        settings: Snakemake's object with the config files and the values of ``--config``.

    Returns:
        Warnings for the user.
    """
    hold_results(results)
    refuse_future(str(file) for kind in ("h5", "pt", "csv") for file in results.rglob(f"*.{kind}"))
    files = settings.configfiles
    earlier = ", ".join(earlier_configs(results, files, config))
    record_config(config, results, files, settings.config, settings.config_args or [])
    warning = (
        f"{results} contains results of {earlier}. This run replaces files with the same names. To "
        "keep the results of both, set `results` to a different folder in each config."
    )
    return [warning] if earlier else []


def show_results(
    files: Mapping[str, Sequence[str]], results: Path, logger: Logger, *, is_stored: bool
) -> None:
    """Log which files exist at the end of a run, and what the report says about the results.

    The log repeats the report's sentence on how well the models predict their training samples, and
    the titles of its warnings. ``is_stored`` means that the results are in remote storage.
    """
    for kind, paths in files.items():
        if existing := sorted(file for file in paths if is_stored or Path(file).exists()):
            logger.info(f"{kind}: {', '.join(existing)}")
    report = results / "report.html"
    if is_stored or not report.exists():
        return
    page = report.read_text(encoding="utf-8")
    for text in re.findall(r'<p class="fit">(.*?)</p>', page):
        logger.info(unescape(text))
    if titles := re.findall(r'<div class="warning">\n<h3>(.*?)</h3>', page):
        logger.warning(f"The report warns: {unescape('; '.join(titles))}.")


def earlier_configs(
    results: Path, config_files: Sequence[Path], config: Mapping[str, Any]
) -> list[str]:
    """Return the config files of the last run in a results folder if this run uses other files.

    If this run uses one of the same files, or if the folder is a copy, return []. Raise an error if
    the last run was for another study and its config files still exist.
    """
    known = read_record(results / CONFIG_RECORD)
    earlier = known.get("config_files", [])
    here = {os.path.relpath(file) for file in config_files}
    if not earlier or not here or here & {*earlier}:
        return []
    study, other = _study_of(config), _study_of(known["config"])
    there = [file for file in earlier if Path(results, known["folder"], file).exists()]
    if there and study != other:
        raise InputError(
            "A results folder must contain the results of only one study. Found results of "
            f"{', '.join(there)} with the study {Path(other[0]).stem} in {results}. Set "
            f"`results` to a new folder in {min(here)}, or remove the folder {results}.",
            code="config.results_of_another",
        )
    return [] if _is_copy(known, results) else earlier


def differences_of_copy(config: Mapping[str, Any], results: Path) -> list[str]:
    """Return a warning if the results in a copied folder are for settings other than ``config``.

    Snakemake would not notice the difference, because it has no record of the settings of copied
    files and treats them as finished.
    """
    known = read_record(results / CONFIG_RECORD)
    if not known or not _is_copy(known, results):
        return []
    now, before = ({**c, "study": _study_of(c)[0]} for c in (config, known["config"]))
    now = json.loads(json.dumps(now))
    keys = sorted((now.keys() | before) - {"results", "compute", "answers"})
    changed = [key for key in keys if now.get(key) != before.get(key)]
    warning = (
        f"{results} is a copy of a folder whose results were computed with different settings: "
        f"{', '.join(changed)}. Snakemake treats the copied files as finished. To recompute them, "
        "run once with --forceall."
    )
    return [warning] if changed else []


def _is_copy(known: Mapping[str, Any], results: Path) -> bool:
    """Return whether a folder of results is a copy, because ``known`` was recorded elsewhere."""
    made = Path(results, known["folder"], known.get("results", ""))
    return "results" in known and os.path.relpath(made) != os.path.relpath(results)


def _study_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of a config's study, and ``study_arguments``, to compare two configs."""
    # The path of a generated study file contains the results folder and a digest, which can differ
    # for the same study. Only the name of the study is kept.
    study = re.sub(r"(?:.*/)?(\w+)_study_[0-9a-f]{8}\.py$", r"\1", str(config.get("study")))
    return study, config.get("study_arguments")

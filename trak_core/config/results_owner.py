"""Tell whose a results folder is: another config's, another study's, or a copy of another."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from trak_core.config.preflight import refuse_future
from trak_core.config.read_config import CONFIG_RECORD, record_config
from trak_core.errors import InputError
from trak_core.system.files import check_results, hold_results, read_record


def begin_run(
    config: Mapping[str, Any],
    results: Path,
    config_files: Sequence[Path],
    given: Mapping[str, Any],
    entries: Sequence[str],
) -> list[str]:
    """Take a results folder for a run that has jobs to do.

    What was ``given`` by ``--config`` stands in ``entries`` as on the command line.

    Returns:
        Warnings for the user.
    """
    check_results(results)
    hold_results(results)
    refuse_future(str(file) for kind in ("h5", "pt", "csv") for file in results.rglob(f"*.{kind}"))
    earlier = ", ".join(earlier_configs(results, config_files, config))
    record_config(config, results, config_files, given, entries)
    if not earlier:
        return []
    return [
        f"{results} is what {earlier} made. This run replaces files of the same names there, and "
        "leaves the others. To keep both, give each config a `results` of its own."
    ]


def what_to_read(
    files: Mapping[str, Sequence[str]], results: Path, *, is_stored: bool
) -> tuple[list[str], list[str]]:
    """Return where a run has put what its user wants to read, and the report's warnings.

    ``files`` has the names of files by kind; those that aren't there are left out.
    """
    there = {
        kind: ", ".join(sorted(file for file in own if is_stored or Path(file).exists()))
        for kind, own in files.items()
    }
    said = [f"{kind}: {names}" for kind, names in there.items() if names]
    written = results / "report.html"
    page = written.read_text(encoding="utf-8") if written.exists() and not is_stored else ""
    patterns = '<p class="fit">(.*?)</p>', '<div class="warning">\n<h3>(.*?)</h3>'
    measures, titles = ([unescape(t) for t in re.findall(p, page)] for p in patterns)
    warnings = [f"The report warns: {'; '.join(titles)}."] if titles else []
    return said + measures, warnings


def earlier_configs(
    results: Path, config_files: Sequence[Path], config: Mapping[str, Any]
) -> list[str]:
    """Return the config files of a folder's last start, if this one has none of them.

    A copy of a folder replaces nothing of theirs, so that none are returned for it.

    Raises:
        InputError: If they are still there, and of another study than ``config``'s.
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
            f"The results folder must be this study's own. Found in {results} what "
            f"{', '.join(there)} made of another, {Path(other[0]).stem}, which this run would "
            f"replace. Name a new folder as `results` in {min(here)}, or remove {results} if "
            "nobody needs it.",
            code="config.results_of_another",
        )
    return [] if _is_copy(known, results) else earlier


def differences_of_copy(config: Mapping[str, Any], results: Path) -> list[str]:
    """Return a warning of the keys by which a copied folder's files were made that are others now.

    Snakemake has no record of what made a copy's files, and takes them as finished. Keys that
    decide no numbers don't count; a folder that is no copy has none.
    """
    known = read_record(results / CONFIG_RECORD)
    if not known or not _is_copy(known, results):
        return []
    own, other = ({**c, "study": _study_of(c)[0]} for c in (config, known["config"]))
    keys = sorted((own.keys() | other) - {"results", "compute", "answers"})
    own = json.loads(json.dumps(own))
    changed = [key for key in keys if own.get(key) != other.get(key)]
    if not changed:
        return []
    return [
        f"{results} is a copy of a folder that was made with another {', '.join(changed)}. Files "
        "in it count as finished, whatever made them: run once with --forceall."
    ]


def _is_copy(known: Mapping[str, Any], results: Path) -> bool:
    """Return whether a folder's record is of a start with another results folder."""
    made = Path(results, known["folder"], known.get("results", ""))
    return "results" in known and os.path.relpath(made) != os.path.relpath(results)


def _study_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return what a started config's study is, whatever version and folder have a file of it."""
    study = re.sub(r"(?:.*/)?(\w+)_study_[0-9a-f]{8}\.py$", r"\1", str(config.get("study")))
    return study, config.get("study_arguments")

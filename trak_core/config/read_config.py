"""Read a config without Snakemake, and the tables and Python files that it names."""

import csv
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trak_core.config.ready_made import with_ready_study
from trak_core.config.schema import (
    check_config,
    check_unique_keys,
    merged,
    with_defaults,
    with_values_read,
)
from trak_core.errors import InputError
from trak_core.model_outputs.table import output_name, place_of
from trak_core.provenance import study_modules
from trak_core.system.files import read_record, write_record

# In place of ids: every sample of target_data().
ALL_TARGETS = "all"


def read_table(
    path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """Return rows of stripped strings from columns of a tab-separated table with a header.

    Columns and their cells must be there; ``optional`` ones may lack, or be empty.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: the table must exist. Found nothing there.", code="config.missing_table"
        )
    try:
        # Spreadsheets begin UTF-8 with a mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t", strict=True)
            return _read_rows(reader, path, columns, optional)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: the table must be tab-separated text in UTF-8. Reading it failed: {error}."
        ) from error


def _read_rows(
    reader: csv.DictReader, path: Path, columns: tuple[str, ...], optional: tuple[str, ...]
) -> list[tuple[str, ...]]:
    header = [*(reader.fieldnames or ())]
    if any(header.count(c) != 1 for c in columns) or any(header.count(c) > 1 for c in optional):
        missing = ", ".join(c for c in columns if c not in header) or "none"
        raise InputError(
            f"{path}: the table must be tab-separated with the columns {', '.join(columns)}, each "
            f"once. Missing: {missing}; found {', '.join(header) or 'nothing'}."
        )
    rows = []
    for row in reader:
        cells = tuple((row[c] or "").strip() for c in columns)
        if not all(cells):
            raise InputError(
                f"{path}: every row of the table must fill the columns {', '.join(columns)}. Found "
                f"{', '.join(map(repr, cells))} in line {reader.line_num}."
            )
        rows.append((*cells, *((row.get(c) or "").strip() for c in optional)))
    if not rows:
        raise InputError(f"{path}: the table must have rows. Found only a header.")
    return rows


def target_ids(targets: list[int | str] | str) -> list[int | str] | None:
    """Return an experiment's target ids, which are given or in a table's column ``id``.

    None for ``all``: what target_data() has.

    Ids of a table count as integers if all of them are written as one is, so that 0007 stays text.
    """
    if targets == ALL_TARGETS:
        return None
    if not isinstance(targets, str):
        return list(targets)
    ids = [row[0] for row in read_table(Path(targets), ("id",))]
    integers = all(re.fullmatch(r"0|-?[1-9]\d*", i) for i in ids)
    return [int(i) for i in ids] if integers else list(ids)


_RECORD = "config.json"


def read_config(path: Path, schema: Path) -> dict[str, Any]:
    """Return a config with its schema's defaults, as a start of Snakemake has it; write nothing.

    What the last start with this config was given by ``--config`` counts, if it left that in the
    results folder that the file names.

    Raises:
        InputError: If the config is not valid, as at a start.
    """
    check_unique_keys(path)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise InputError(
            f"{path}: a config must be a mapping of keys to values. Found {type(config).__name__}.",
            code="config.no_mapping",
        )
    config = with_ready_study(merged(config, given_by_command(path, config)), writes=False)
    rules = yaml.safe_load(schema.read_text(encoding="utf-8"))
    check_config(config, rules)
    config = with_defaults(config, rules)
    return config | {"results": str(Path(config["results"]))}


def given_by_command(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``--config`` said at the last start with this config file alone."""
    results = config.get("results", "results")
    known = read_record(Path(results) / _RECORD) if isinstance(results, str) else {}
    files = [Path(results, known["folder"], file) for file in known.get("config_files", ())]
    is_same = [file.resolve() for file in files] == [path.resolve()]
    return known["by_command"] if is_same else {}


def record_config(
    config: Mapping[str, Any],
    results: Path,
    config_files: Sequence[Path] = (),
    given: Mapping[str, Any] | None = None,
    entries: Sequence[str] = (),
) -> None:
    """Keep the config of a start in its results folder, for who has no more than that folder.

    The working folder, from which the config's paths count, is kept relative to it. So are the
    ``config_files`` of the start, and what it was ``given`` by ``--config`` beside them, whose
    ``entries`` stand as on the command line.
    """
    known = {
        "config": dict(config),
        "folder": os.path.relpath(Path.cwd(), results),
        "config_files": [os.path.relpath(file) for file in config_files],
        "by_command": with_values_read(given or {}, entries),
    }
    if read_record(results / _RECORD) != known:
        write_record(results / _RECORD, known)


def has_record(results: Path) -> bool:
    """Return whether a start has left its config in a results folder."""
    return bool(read_record(results / _RECORD))


def recorded_config(results: Path) -> tuple[dict[str, Any], Path]:
    """Return the config of the last run of a results folder, and the folder it ran in.

    Raises:
        InputError: If no start has left it there.
    """
    known = read_record(results / _RECORD)
    if not known:
        raise InputError(
            f"{results}: a results folder must hold {_RECORD}, which every start of a run leaves "
            "there, so that it can be asked. Found none, or a damaged one. Start the run again: "
            "`trak run` and its config; what is finished stays.",
            code="config.no_record",
        )
    return known["config"], Path(os.path.normpath(results / known["folder"]))


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

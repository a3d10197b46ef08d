"""Read a config without Snakemake: from its file, or from what the last start has left."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trak_core.config.ready_made import with_ready_study
from trak_core.config.schema import check_config, check_unique_keys, with_defaults
from trak_core.errors import InputError
from trak_core.system.files import read_record, write_record

_RECORD = "config.json"


def read_config(path: Path, schema: Path) -> dict[str, Any]:
    """Return a config with its schema's defaults, as a start of Snakemake has it; write nothing.

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
    config = with_ready_study(config, writes=False)
    rules = yaml.safe_load(schema.read_text(encoding="utf-8"))
    check_config(config, rules)
    config = with_defaults(config, rules)
    return config | {"results": str(Path(config["results"]))}


def record_config(config: Mapping[str, Any], results: Path) -> None:
    """Keep the config of a start in its results folder, for who has no more than that folder.

    The working folder, from which the config's paths count, is kept relative to it.
    """
    known = {"config": dict(config), "folder": os.path.relpath(Path.cwd(), results)}
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

"""Checking a config, in words a user can act on. Pure functions: the Snakefile reads the files."""

import csv
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators
import yaml

from trak_core.errors import InputError
from trak_core.spec import stream_of

_ID_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
# An average's specification lists its checkpoints in one HDF5 attribute, which holds 64 KiB.
_ATTRIBUTE_BYTES = 60_000
_CHECKPOINT_BYTES = 100  # its SHA-256 and what JSON puts around it

# JSON Schema calls 16.0 an integer; sizes and seeds that reach NumPy as floats are errors there.
# NaN is neither below a minimum nor above a maximum.
_Validator = jsonschema.validators.extend(  # pyright: ignore[reportAttributeAccessIssue]
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many({
        "integer": lambda _, value: type(value) is int,
        "number": lambda _, value: type(value) in {int, float} and math.isfinite(value),
    }),
)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where plain YAML keeps the last without a word."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = [(loader.construct_object(key, deep=True), key) for key, _ in node.value]
    seen: dict[Any, int] = {}
    for name, key in pairs:
        line = key.start_mark.line + 1
        if not isinstance(name, Hashable):
            raise InputError(
                f"{key.start_mark.name}: a key must be text. Found {name!r} in line {line}."
            )
        if name in seen:
            raise InputError(
                f"{key.start_mark.name}: a key must be given once. Found {name!r} in lines "
                f"{seen[name]} and {line}; the first would be lost without a word."
            )
        seen[name] = line
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def check_unique_keys(path: Path) -> None:
    """Refuse a YAML file in which a key stands twice in one mapping.

    Raises:
        InputError: It names the key and both lines.
    """
    with path.open(encoding="utf-8") as file:
        try:
            yaml.load(file, Loader=_UniqueKeyLoader)  # ruff: ignore[unsafe-yaml-load] -- a SafeLoader
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: a config must be YAML. {error}") from error


def _explained(error: jsonschema.ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the config"
    schema: Mapping[str, Any] = error.schema if isinstance(error.schema, Mapping) else {}
    if error.validator == "additionalProperties":
        known = schema.get("properties", {})
        given = error.instance if isinstance(error.instance, Mapping) else {}
        unknown = ", ".join(repr(key) for key in given if key not in known)
        return f"{where}: unknown key {unknown}. Known keys: {', '.join(known)}."
    if error.validator == "required":
        return f"{where}: {error.message}."
    meaning = schema.get("description")
    expected = {
        "type": lambda: (
            "must be a finite number"
            if error.validator_value == "number"
            else f"must be of type {error.validator_value}"
        ),
        "enum": lambda: f"must be one of {', '.join(map(str, schema.get('enum', ())))}",
        "const": lambda: f"must be {error.validator_value}",
        "minimum": lambda: f"must be at least {error.validator_value}",
        "exclusiveMinimum": lambda: f"must be above {error.validator_value}",
        "maximum": lambda: f"must be at most {error.validator_value}",
        "minItems": lambda: "must not be empty",
        "minProperties": lambda: "must not be empty",
    }.get(str(error.validator), lambda: error.message)()
    text = f"{where}: {expected}. Found {error.instance!r}."
    return f"{text} Meaning: {meaning}" if meaning else text


def _leaves(error: jsonschema.ValidationError) -> Iterable[jsonschema.ValidationError]:
    """Yield what went wrong in the alternative that was meant: the one of the value's type."""
    other_types = {
        e.schema_path[0] for e in error.context or () if e.validator == "type" and not e.path
    }
    meant = [e for e in error.context or () if e.schema_path[0] not in other_types]
    if error.validator in ("anyOf", "oneOf") and meant:
        for inner in meant:
            yield from _leaves(inner)
    else:
        yield error


def _check_plain(value: Any, where: str = "") -> None:
    """Refuse what YAML reads as a date, a set or bytes, and keys that it reads as a number.

    Ids of checkpoints are made strings.
    """
    if isinstance(value, list):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{where}[{i}]")
        return
    if not isinstance(value, Mapping):
        if not isinstance(value, str | int | float | None):
            raise InputError(
                f"{where}: a value must be text, a number, a list or a mapping. Found {value!r}: "
                "put it in quotes."
            )
        return
    for key, inner in value.items():
        if not isinstance(key, str) and where != "checkpoints":
            raise InputError(
                f"{where or 'the config'}: a name must be text. Found {key!r}: put it in quotes."
            )
        _check_plain(inner, f"{where}.{key}".removeprefix("."))


def check_config(config: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Compare a config with its schema.

    Args:
        config: Plain values.
        schema: JSON Schema, draft 2020-12.

    Raises:
        InputError: It lists everything that is wrong, a line each.
    """
    _check_plain(config)
    errors = [leaf for error in _Validator(schema).iter_errors(config) for leaf in _leaves(error)]
    lines = list(dict.fromkeys(_explained(error) for error in errors))
    if lines:
        raise InputError("The config is not valid:\n  " + "\n  ".join(lines))


def check_exact(config: Mapping[str, Any]) -> None:
    """Refuse what exact scores can't do, for a config that is valid otherwise.

    Args:
        config: With its defaults filled in, and ``projection: exact``.

    Raises:
        InputError: It names the key.
    """
    if config["scoring"]["keep"] != "full":
        raise InputError(
            "With `projection: exact`, scoring.keep must be full: top_k streams projected "
            f"features. Found {config['scoring']['scores']}. Set it to full, or take a projection."
        )
    shards = {"compute": config["compute"]["shards"]} | {
        f"experiments.{name}": one["shards"] for name, one in config["experiments"].items()
    }
    for where, n in shards.items():
        if n != 1:
            raise InputError(
                "With `projection: exact`, shards must be 1: a gramian pairs every training sample "
                f"with every other. Found {n} in {where}.shards. Leave it out, or take a "
                "projection."
            )
    if config["features_dtype"] != "float32":
        raise InputError(
            "With `projection: exact`, no features are stored. Found features_dtype "
            f"{config['features_dtype']}. Leave it out, or take a projection."
        )
    if "distortion" in config:
        raise InputError(
            "With `projection: exact`, nothing is projected: no distortion is there to measure. "
            "Found distortion. Leave it out, or take a projection."
        )


def check_distortion(config: Mapping[str, Any], n_train: int) -> None:
    """Refuse to measure distortion on more training samples than there are.

    Args:
        config: With its defaults filled in; distortion may be left out.
        n_train: Training samples.

    Raises:
        InputError: If there are fewer.
    """
    samples = config.get("distortion", {}).get("samples", 0)
    if samples > n_train:
        raise InputError(
            f"distortion.samples must not exceed the training samples. Found {samples} of "
            f"{n_train}. Lower it."
        )


def read_table(path: Path, columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Read columns of a tab-separated table with a header.

    Args:
        path: The table.
        columns: Names of the columns to read.

    Returns:
        One tuple of stripped strings a row.

    Raises:
        InputError: If the file or a column is missing, if it has no rows, or if a row lacks a cell.
    """
    if not path.is_file():
        raise InputError(f"{path}: the table must exist. Found nothing there.")
    try:
        # Spreadsheets begin UTF-8 with a mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read_rows(csv.DictReader(file, delimiter="\t", strict=True), path, columns)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: the table must be tab-separated text in UTF-8. Reading it failed: {error}."
        ) from error


def _read_rows(
    reader: csv.DictReader, path: Path, columns: tuple[str, ...]
) -> list[tuple[str, ...]]:
    found = [*(reader.fieldnames or ())]
    if any(found.count(c) != 1 for c in columns):
        missing = ", ".join(c for c in columns if c not in found) or "none"
        raise InputError(
            f"{path}: the table must be tab-separated with the columns {', '.join(columns)}, each "
            f"once. Missing: {missing}; found {', '.join(found) or 'nothing'}."
        )
    rows = []
    for row in reader:
        cells = tuple((row[c] or "").strip() for c in columns)
        if not all(cells):
            raise InputError(
                f"{path}: every row of the table must fill the columns {', '.join(columns)}. Found "
                f"{', '.join(map(repr, cells))} in line {reader.line_num}."
            )
        rows.append(cells)
    if not rows:
        raise InputError(f"{path}: the table must have rows. Found only a header.")
    return rows


def checkpoint_table(checkpoints: Mapping[Any, Any] | str, *, trained: bool) -> dict[str, Any]:
    """Return checkpoint ids with their paths or training arguments, sorted by id.

    Args:
        checkpoints: The config's ``checkpoints``: a mapping, or the path of a table with the
            columns ``checkpoint`` and ``path``.
        trained: Whether the pipeline trains them; then values are arguments, not paths.

    Raises:
        InputError: If an id is not usable as a file name, stands twice, or shares its projection
            stream with another, or if values are not what ``trained`` asks for.
    """
    if isinstance(checkpoints, str):
        pairs: list[tuple[str, Any]] = [
            (i, p) for i, p in read_table(Path(checkpoints), ("checkpoint", "path"))
        ]
    else:
        pairs = [(str(i), value) for i, value in checkpoints.items()]
    names = [name for name, _ in pairs]
    if sum(len(name) + _CHECKPOINT_BYTES for name in names) > _ATTRIBUTE_BYTES:
        raise InputError(
            "A study must have at most about 500 checkpoints, whose list fits a file's 64 KiB of "
            f"attributes. Found {len(names)}."
        )
    streams: dict[int, str] = {}
    for name, value in pairs:
        if not re.fullmatch(_ID_PATTERN, name):
            raise InputError(
                "A checkpoint's id becomes a file name: letters, digits, '.', '_' and '-', not "
                f"starting with '.' or '-'. Found {name!r}."
            )
        if names.count(name) > 1:
            raise InputError(f"A checkpoint's id must be its own. Found {name!r} twice.")
        if isinstance(value, str) == trained:
            raise InputError(
                "With `training`, a checkpoint must be a mapping of training arguments; without "
                f"it, the path of a file or folder. Found {value!r} for checkpoint {name!r}, "
                f"{'with' if trained else 'without'} `training`."
            )
        other = streams.setdefault(stream_of(name), name)
        if other != name:
            raise InputError(
                f"Checkpoints must have projections of their own. The ids {other!r} and "
                f"{name!r} give the same one by chance: rename either."
            )
    return dict(sorted(pairs))


def target_ids(targets: list[int | str] | str) -> list[int | str]:
    """Return an experiment's target ids.

    Args:
        targets: The ids, or the path of a table with the column ``id``; ids there count as
            integers if all of them are written as one is, so that 0007 stays text.

    Raises:
        InputError: If the table is missing or malformed.
    """
    if not isinstance(targets, str):
        return list(targets)
    ids = [row[0] for row in read_table(Path(targets), ("id",))]
    integers = all(re.fullmatch(r"0|-?[1-9]\d*", i) for i in ids)
    return [int(i) for i in ids] if integers else list(ids)


def ordered(value: Any) -> Any:
    """Return plain values with the keys of every mapping sorted.

    Snakemake compares the text of a job's params: the order of keys in a config must not count.
    """
    if isinstance(value, Mapping):
        return {str(key): ordered(value[key]) for key in sorted(value, key=str)}
    return [ordered(item) for item in value] if isinstance(value, list | tuple) else value

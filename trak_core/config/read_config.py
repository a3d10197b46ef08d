"""Read a config and the tables that it refers to, and validate it with its JSON Schema."""

import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators
import yaml

from trak_core.config.bind_study_arguments import with_ready_study
from trak_core.dependency_digests import study_modules
from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import function_location, output_name
from trak_core.runtime.files import CONFIG_RECORD, read_record, write_record

# The value of `targets` that selects all samples of target_data().
ALL_TARGETS = "all"


def read_table(
    path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """Return the rows of a tab-separated table that has a header.

    Each row contains the cells of ``columns``, then those of ``optional``, without surrounding
    spaces. No cell of ``columns`` may be empty. The ``optional`` columns may be empty or missing.
    """
    if not path.is_file():
        raise InputError(
            f"{path}: the table must exist. Found no file with this path.",
            code="config.missing_table",
        )
    try:
        # Spreadsheets write a byte order mark, which utf-8-sig skips.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t", strict=True)
            header = [*(reader.fieldnames or ())]
            numbered = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path}: the table must be tab-separated text in UTF-8. Reading it failed: {error}.",
            code="config.table",
        ) from error
    if any(header.count(c) != 1 for c in columns) or any(header.count(c) > 1 for c in optional):
        missing = ", ".join(c for c in columns if c not in header) or "none"
        raise InputError(
            f"{path}: the table must be tab-separated, and must have each of the columns "
            f"{', '.join(columns)} once. Missing: {missing}. Found "
            f"{', '.join(header) or 'nothing'}.",
            code="config.table",
        )
    rows = []
    for number, row in numbered:
        cells = tuple((row[c] or "").strip() for c in columns)
        if not all(cells):
            raise InputError(
                f"{path}: every row must have a value in each of the columns {', '.join(columns)}. "
                f"Found {', '.join(map(repr, cells))} in line {number}.",
                code="config.table",
            )
        surplus = row.get(None) or []
        if any(surplus):
            raise InputError(
                f"{path}: no row may have more cells than the header, which has {len(header)}. "
                f"Found {len(header) + len(surplus)} cells in line {number}.",
                code="config.table",
            )
        rows.append((*cells, *((row.get(c) or "").strip() for c in optional)))
    if not rows:
        raise InputError(
            f"{path}: the table must have rows. Found only a header.", code="config.table"
        )
    return rows


def target_ids(targets: list[int | str] | str) -> list[int | str] | None:
    """Return the ids of an experiment's targets, or None if ``targets`` is ``all``.

    ``targets`` is a list of ids, or the path of a table with the column ``id``. The ids in a table
    are read as integers if all of them are decimal integers without leading zeros, and otherwise
    as texts.
    """
    if targets == ALL_TARGETS:
        return None
    if not isinstance(targets, str):
        return list(targets)
    ids = [row[0] for row in read_table(Path(targets), ("id",))]
    integers = all(re.fullmatch(r"0|-?[1-9]\d*", i) for i in ids)
    return [int(i) for i in ids] if integers else list(ids)


def read_config(path: Path, schema: Path) -> dict[str, Any]:
    """Read a config file, with the ``--config`` values of its last run, and return all settings."""
    check_unique_keys(path)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise InputError(
            f"{path}: a config must be a mapping of keys to values. Found {type(config).__name__}.",
            code="config.no_mapping",
        )
    return completed(merged(config, given_by_command(path, config)), schema, writes=False)


def completed(
    config: Mapping[str, Any], schema: Path, *, entries: Sequence[str] = (), writes: bool = True
) -> dict[str, Any]:
    """Return the checked config with all defaults. ``study`` is then the path of a Python file.

    ``entries`` are the ``key=value`` words of ``--config``. If ``study_arguments`` require a
    generated Python file, it is written unless ``writes`` is false.
    """
    config = with_ready_study(with_values_read(config, entries), writes=writes)
    keys = yaml.safe_load(schema.read_text("utf-8"))
    check_config(config, keys)
    config = with_defaults(config, keys)
    # Path() removes a leading ./ and a trailing /, about which Snakemake would warn.
    return config | {"results": str(Path(config["results"]))}


def given_by_command(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``--config`` values of the last run, or {} if it used other config files."""
    results = config.get("results", "results")
    known = read_record(Path(results) / CONFIG_RECORD) if isinstance(results, str) else {}
    files = [Path(results, known["folder"], file) for file in known.get("config_files", ())]
    is_same = [file.resolve() for file in files] == [path.resolve()]
    return known["by_command"] if is_same else {}


def record_config(
    config: Mapping[str, Any],
    results: Path,
    config_files: Sequence[Path] = (),
    command_config: Mapping[str, Any] | None = None,
    entries: Sequence[str] = (),
    *,
    replaces: bool = True,
) -> None:
    """Record a run's config in its results folder, so that commands need no config file later.

    ``command_config`` contains the values of ``--config`` as Snakemake parsed them, and ``entries``
    the same values as ``key=value`` words. If ``replaces`` is false, an existing record is kept.
    """
    known = {
        "config": dict(config),
        "folder": os.path.relpath(Path.cwd(), results),
        "results": os.path.relpath(results),
        "config_files": [os.path.relpath(file) for file in config_files],
        "by_command": with_values_read(command_config or {}, entries),
    }
    before = read_record(results / CONFIG_RECORD)
    if known != before and (replaces or not before):
        write_record(results / CONFIG_RECORD, known)


def recorded_config(results: Path) -> tuple[dict[str, Any], Path]:
    """Return the config and the working folder of the last run that used a results folder."""
    known = read_record(results / CONFIG_RECORD)
    if not known:
        raise InputError(
            f"{results}: a results folder must contain {CONFIG_RECORD}, which each run writes. "
            "Found no such file, or a damaged one. Run `trak run` with the config again.",
            code="config.no_record",
        )
    return known["config"], Path(os.path.normpath(results / known["folder"]))


def module_folders(question: Path, study: Path) -> list[Path]:
    """Return the folders to search for modules that the study or ``question`` imports."""
    return [question.parent, study.parent]


def python_modules(study: Path, questions: Sequence[Path]) -> list[Path]:
    """Return the Python files of a study and of experiments, and the local modules they import.

    ``questions`` are the Python files in the config other than the study, such as an experiment's
    ``data``. Raise an error if two different files have the same name.
    """
    named = study_modules(study)
    # The folder of a file of targets is searched first, even for modules that the study imports.
    pairs = [(code, module_folders(path, study)) for path in questions for code in (study, path)]
    for name, file in (m for code, folders in pairs for m in study_modules(code, folders).items()):
        other = named.setdefault(name, file)
        if other.resolve() != file.resolve():
            raise InputError(
                "The Python files of a study and its experiments must have different names, "
                f"because one process imports them. Found {other} and {file}. Rename one of them.",
                code="config.module_names",
            )
    return [*named.values()]


def output_file(model_output: str | Mapping[str, str], study: Path) -> Path | None:
    """Return the Python file of a user-defined model output.

    Return None if the model output is built in, or if it is defined in the file ``study``.
    """
    place = function_location(output_name(model_output))
    if place is None or Path(place[0]).resolve() == study.resolve():
        return None
    if not Path(place[0]).is_file():
        raise InputError(
            "model_output: the Python file that contains the function must exist. Found no file at "
            f"{place[0]} (relative to {Path.cwd()}).",
            code="config.missing_output",
        )
    return Path(place[0])


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that raises an error for duplicate keys, which PyYAML's own loaders accept."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    # The keys are read before construct_mapping replaces a merge key (<<) with the keys of another
    # mapping, which may repeat keys of this one.
    pairs = [(loader.construct_object(key, deep=True), key) for key, _ in node.value]
    mapping = loader.construct_mapping(node, deep=True)  # Lists as keys raise an error.
    lines: dict[Any, int] = {}
    for name, key in pairs:
        line = key.start_mark.line + 1
        if name in lines:
            raise InputError(
                f"{key.start_mark.name}: each key of a mapping must be unique. Found {name!r} in "
                f"lines {lines[name]} and {line}. YAML would ignore the first value. Remove one.",
                code="config.key_twice",
            )
        lines[name] = line
    return mapping


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    """Return a number, or raise an error if YAML 1.1 reads it in base 8 (0123) or 60 (1:30)."""
    is_integer = node.tag.endswith("int")
    value = loader.construct_yaml_int(node) if is_integer else loader.construct_yaml_float(node)
    if re.fullmatch(r"[-+]?0[0-7_]+|.*:.*", node.value):
        raise InputError(
            f"{node.start_mark.name}: a number must be decimal. Found {node.value} in line "
            f"{node.start_mark.line + 1}, which YAML reads as {value}. Put it in quotes if it is "
            "text.",
            code="config.octal",
        )
    return value


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def check_unique_keys(path: Path) -> None:
    """Raise an error if a config file is not valid YAML, or if a mapping repeats a key."""
    try:
        loader = _UniqueKeyLoader(path.read_text(encoding="utf-8"))
        loader.name = str(path)
        loader.get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: a config must be valid YAML. {reason}.", code="config.no_yaml"
        ) from error


class _TextKeyLoader(yaml.SafeLoader):
    """A YAML loader that reads all keys as text, as Snakemake does for ``--config``."""


for _loader in (_UniqueKeyLoader, _TextKeyLoader):
    _loader.add_constructor("tag:yaml.org,2002:int", _number)
    _loader.add_constructor("tag:yaml.org,2002:float", _number)
_TextKeyLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    lambda loader, node: {
        str(key.value): loader.construct_object(value, deep=True) for key, value in node.value
    },
)


def merged(old: Any, new: Any) -> Any:
    """Return ``new``. If both values are mappings, merge them recursively, as Snakemake does."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


def with_values_read(config: Mapping[str, Any], entries: Sequence[str]) -> dict[str, Any]:
    """Return ``config`` with the values inside mappings and lists of ``--config`` parsed as YAML.

    ``entries`` are the ``key=value`` words after ``--config``. Snakemake has already parsed
    ``top=3`` as a number, but in ``projection={proj_dim: 256}`` it leaves the number as text.
    """
    read = dict(config)
    for key, _, text in (entry.partition("=") for entry in entries):
        if isinstance(read.get(key), Mapping | list):
            loader = _TextKeyLoader(text)
            loader.name = f"--config {key}"
            try:
                read[key] = merged(read[key], loader.get_single_data())
            except InputError:
                raise
            except (yaml.YAMLError, ValueError) as error:
                raise InputError(
                    f"--config {key}: the value must be YAML. {error}", code="config.no_yaml"
                ) from error
    return read


def _check_plain(value: Any, where: str = "") -> None:
    """Raise an error for values that JSON lacks, such as dates, and for keys that are not text.

    ``where`` is the key of ``value`` in the config, which error messages show. The ids of
    checkpoints need not be text.
    """
    if isinstance(value, list):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{where}[{i}]")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str) and where != "checkpoints":
                raise InputError(
                    f"{where or 'the config'}: every key must be text. Found {key!r}. Put this key "
                    "in quotes.",
                    code="config.text_name",
                )
            _check_plain(inner, f"{where}.{key}".removeprefix("."))
    elif not isinstance(value, str | int | float | None):
        raise InputError(
            f"{where}: a value must be text, a number, a list or a mapping. Found {value!r}. "
            "If you mean text, put it in quotes.",
            code="config.plain_value",
        )


# JSON Schema accepts 16.0 as an integer, which NumPy does not, and accepts NaN regardless of a
# minimum and a maximum. The types of this validator are stricter.
_Validator = jsonschema.validators.extend(  # pyright: ignore[reportAttributeAccessIssue]
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many({
        "integer": lambda _, value: type(value) is int,
        "number": lambda _, value: type(value) in {int, float} and math.isfinite(value),
    }),
)


def _explained(error: jsonschema.ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the config"
    schema: Mapping[str, Any] = error.schema if isinstance(error.schema, Mapping) else {}
    if error.validator == "additionalProperties":
        known = schema.get("properties", {})
        unknown = [key for key in dict(error.instance) if key not in known]  # pyright: ignore
        near = [name for key in unknown for name in get_close_matches(str(key), known, 1)]
        meant = f" Did you mean {', '.join(near)}?" if near else ""
        shown = ", ".join(map(repr, unknown))
        return f"{where}: unknown key {shown}.{meant} Known keys: {', '.join(known) or 'none'}."
    if error.validator == "required":
        return f"{where}: {error.message}."
    # Only the first paragraph of a description is shown. The others are for the documentation.
    meaning = schema.get("description", "").partition("\n")[0]
    limit: Any = error.validator_value
    expected = {
        "type": lambda: f"must be {_kind(limit)}",
        "anyOf": lambda: f"must be {_alternatives(limit)}",
        "enum": lambda: f"must be one of {', '.join(map(str, schema.get('enum', ())))}",
        "minimum": lambda: f"must be at least {limit}",
        "exclusiveMinimum": lambda: f"must be above {limit}",
        "maximum": lambda: f"must be at most {limit}",
        "exclusiveMaximum": lambda: f"must be below {limit}",
        **dict.fromkeys(("minItems", "minLength", "minProperties"), lambda: "must not be empty"),
        "uniqueItems": lambda: "must list each value once",
        "pattern": lambda: "must have the form described under Meaning",
    }.get(str(error.validator), lambda: error.message)()
    text = f"{where}: {expected}. Found {error.instance!r}."
    return f"{text} Meaning: {meaning}" if meaning else text


_KINDS = {"string": "text", "integer": "an integer", "number": "a finite number"}
_KINDS |= {"boolean": "true or false", "array": "a list", "object": "a mapping"}


def _kind(types: str | Iterable[str]) -> str:
    """Return words for one or several JSON types, such as "an integer or a list"."""
    return " or ".join(_KINDS[name] for name in ([types] if isinstance(types, str) else types))


def _alternatives(schemas: Iterable[Mapping[str, Any]]) -> str:
    """Return words that describe the alternatives of an ``anyOf`` in the schema."""
    schemas = list(schemas)
    if all(schema.keys() == {"required"} for schema in schemas):
        keys = [key for schema in schemas for key in schema["required"]]
        return f"a mapping with {' or '.join(keys)}"
    return " or ".join(schema.get("const") or _kind(schema["type"]) for schema in schemas)


def _leaves(error: jsonschema.ValidationError) -> Iterable[jsonschema.ValidationError]:
    """Yield the most specific errors that jsonschema has found for a validation error.

    An error for an ``anyOf`` only says that no alternative matches. The errors of the alternatives
    that allow the type of the value say why.
    """
    context = error.context or ()
    other = {e.schema_path[0] for e in context if e.validator in ("type", "const") and not e.path}
    meant = [e for e in context if e.schema_path[0] not in other]
    # If one alternative is an enumeration, its error is enough, because it lists the valid words.
    meant = [e for e in meant if e.validator == "enum" and not e.path] or meant
    if meant and not all(e.validator == "required" and not e.path for e in meant):
        for inner in meant:
            yield from _leaves(inner)
    else:
        yield error


def check_config(config: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise an error that lists every way in which a config violates the JSON Schema."""
    _check_plain(config)
    errors = [leaf for error in _Validator(schema).iter_errors(config) for leaf in _leaves(error)]
    lines = list(dict.fromkeys(_explained(error) for error in errors))
    if lines:
        raise InputError("The config is not valid:\n  " + "\n  ".join(lines), code="config.schema")


def _filling(
    validator: Any, properties: Mapping[str, Any], value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Set missing properties of ``value`` to the schema's defaults, then validate as usual."""
    if isinstance(value, dict):
        for key, about in properties.items():
            if "default" in about:
                value.setdefault(key, deepcopy(about["default"]))
    yield from _Validator.VALIDATORS["properties"](validator, properties, value, schema)


_Filler = jsonschema.validators.extend(_Validator, {"properties": _filling})  # pyright: ignore[reportAttributeAccessIssue]


def with_defaults(config: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a valid config in which missing keys have the schema's defaults."""
    filled = deepcopy(dict(config))
    for _ in _Filler(schema).iter_errors(filled):
        pass
    return filled

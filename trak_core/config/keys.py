"""What YAML makes of a config before a schema sees it: keys given twice, dates, odd names."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trak_core.errors import InputError


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


class _TextKeyLoader(yaml.SafeLoader):
    """YAML whose keys are text, as Snakemake leaves those of ``--config``."""


_TextKeyLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    lambda loader, node: {
        str(key.value): loader.construct_object(value, deep=True) for key, value in node.value
    },
)


def with_values_read(config: Mapping[str, Any], entries: Sequence[str]) -> dict[str, Any]:
    """Read values that Snakemake's ``--config`` left as text, as a file's values are read.

    It reads ``top=3`` itself, but leaves all values within ``projection={proj_dim: 256}`` as text.

    Args:
        config: With what the entries gave.
        entries: Each as the command line has it, ``key=value``.

    Returns:
        The config, with those values read.

    Raises:
        InputError: If one of them is no YAML; it names the key.
    """

    def merged(value: Any, given: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(given, Mapping):
            return given
        return {**value, **{key: merged(value.get(key), part) for key, part in given.items()}}

    found = dict(config)
    for key, _, text in (entry.partition("=") for entry in entries):
        if isinstance(found.get(key), Mapping | list):
            try:
                given = yaml.load(text, Loader=_TextKeyLoader)  # ruff: ignore[unsafe-yaml-load] -- a SafeLoader
            except (yaml.YAMLError, ValueError) as error:
                raise InputError(f"--config {key}: the value must be YAML. {error}") from error
            found[key] = merged(found[key], given)
    return found


def check_plain(value: Any, where: str = "") -> None:
    """Refuse what YAML reads as a date, a set or bytes, and keys that it reads as a number.

    Ids of checkpoints are made strings.

    Args:
        value: A config, or a part of it.
        where: That part's key, for the message.

    Raises:
        InputError: It names the key.
    """
    if isinstance(value, list):
        for i, inner in enumerate(value):
            check_plain(inner, f"{where}[{i}]")
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
        check_plain(inner, f"{where}.{key}".removeprefix("."))

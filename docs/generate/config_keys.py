"""Describe every key of a config, from its JSON Schema."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
SCHEMA = REPOSITORY / "workflow/schemas/config.schema.yaml"
# Users choose the names of these keys. Their contents are described once, under a placeholder.
_NAMED = {"experiments": "experiments.{name}"}


def keys_of(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping, bool]]:
    """Yield each key's full name, its schema, and whether it is required, outer keys first."""
    for part in (schema, *schema.get("anyOf", ())):
        required = part.get("required", ())
        for key, value in part.get("properties", {}).items():
            name = f"{prefix}{key}"
            yield name, value, key in required
            yield from keys_of(value, f"{name}.")
            inner = value.get("additionalProperties")
            if isinstance(inner, Mapping) and "properties" in inner:
                yield from keys_of(inner, f"{_NAMED[name]}.")


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


_KINDS = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "`true` or `false`",
    "array": "a list",
    "object": "a mapping",
}


def kind_of(schema: Mapping[str, Any]) -> str:
    """Return a description of the allowed values, with their bounds."""
    if "anyOf" in schema and "type" not in schema:
        return " or ".join(dict.fromkeys(kind_of(part) for part in schema["anyOf"]))
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(_code(value) for value in schema['enum'])}"
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    text = " or ".join(_KINDS[kind] for kind in types)
    if "items" in schema:
        text += f" of {_plural(schema['items'])}"
    bounds = [
        f"{words} {schema[key]:,}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    return ", ".join([text, *bounds])


def _plural(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(_code(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_plural(part) for part in schema["anyOf"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return " or ".join(
        {"string": "texts", "integer": "integers", "number": "numbers"}[t] for t in types
    )


def _default(value: Mapping[str, Any], *, required: bool) -> str:
    if required:
        return "**Must be given.**"
    if value.get("default") not in (None, {}):
        return f"Default: {_code(value['default'])}."
    return "Optional."


def config_keys() -> str:
    """Return a section for every key: its allowed values, its default and its meaning."""
    schema = yaml.safe_load(SCHEMA.read_text())
    parts = []
    for name, value, required in keys_of(schema):
        level = "##" if "." not in name else "###"
        about = (
            f"{kind_of(value)[0].upper()}{kind_of(value)[1:]}. {_default(value, required=required)}"
        )
        meaning = value["description"].replace("\n", "\n\n")
        parts.append(f"{level} `{name}`\n\n{about}\n\n{meaning}\n")
    return "\n".join(parts)

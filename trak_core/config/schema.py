"""Comparing a config with its schema, in words a user can act on."""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import jsonschema
import jsonschema.validators

from trak_core.config.keys import check_plain
from trak_core.errors import InputError

# JSON Schema calls 16.0 an integer; sizes and seeds that reach NumPy as floats are errors there.
# NaN is neither below a minimum nor above a maximum.
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
        given = error.instance if isinstance(error.instance, Mapping) else {}
        unknown = ", ".join(repr(key) for key in given if key not in known)
        near = [
            one
            for key in given
            if key not in known
            for one in get_close_matches(str(key), known, 1)
        ]
        meant = f" Did you mean {', '.join(near)}?" if near else ""
        return f"{where}: unknown key {unknown}.{meant} Known keys: {', '.join(known)}."
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


def check_config(config: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Compare a config with its schema.

    Args:
        config: Plain values.
        schema: JSON Schema, draft 2020-12.

    Raises:
        InputError: It lists everything that is wrong, a line each.
    """
    check_plain(config)
    errors = [leaf for error in _Validator(schema).iter_errors(config) for leaf in _leaves(error)]
    lines = list(dict.fromkeys(_explained(error) for error in errors))
    if lines:
        raise InputError("The config is not valid:\n  " + "\n  ".join(lines))

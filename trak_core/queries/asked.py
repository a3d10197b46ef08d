"""Make a sample of what somebody asks: a line, as an experiment's `data` has them, or a sample."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trak_core.errors import InputError
from trak_core.study.split import Samples, Split, checked_ids, users_code
from trak_core.study.study import Study
from trak_core.study.targets import parsed_json, shortened

_TEXT = "text"


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample to be explained, its id, and the fields of the line that it was made of."""

    id: int | str
    sample: Any
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def split(self) -> Split:
        """The sample as jobs have targets: a split of one."""
        return Split([self.sample], [self.id])  # pyright: ignore[reportArgumentType]


def parsed_line(line: str | bytes) -> dict[str, Any]:
    """Return the fields of a line: those of a JSON object, or ``text`` of any other line.

    Raises:
        InputError: If it is not UTF-8, or begins like a JSON object and is none.
    """
    try:
        text = (line.decode("utf-8-sig") if isinstance(line, bytes) else line).strip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"A line must be UTF-8. Found {line[:40]!r}: {error.reason}.", code="queries.line"
        ) from error
    if not text.startswith("{"):
        return {_TEXT: text}
    try:
        return parsed_json(text)
    except ValueError as error:
        raise InputError(
            "A line must be plain text, or a JSON object such as an experiment's `data` has. Found "
            f"{error}.",
            code="queries.line",
        ) from error


def asked_line(study: Study, line: Mapping[str, Any], number: int) -> Asked:
    """Return the sample that the study's ``encode`` makes of a line's fields.

    The field ``id`` is its id, if there is one; else ``number``.
    """
    fields = {key: value for key, value in line.items() if key != "id"}
    (own_id,) = checked_ids([line.get("id", number)], 1, "The field id of a line")
    encode = study.function("encode")
    signature = inspect.signature(encode)
    try:
        signature.bind(**fields)
    except TypeError as error:
        example = ", ".join(
            f'"{name}": ...'
            for name, taken in signature.parameters.items()
            if taken.default is taken.empty and taken.kind is not taken.VAR_KEYWORD
        )
        raise InputError(
            f"A line must be a JSON object with the fields that the study's encode{signature} "
            f"takes, such as {{{example}}}. Found {', '.join(fields) or 'none'}: {error}.",
            code="queries.line",
        ) from error
    with users_code(f"{study.path}: encode() of {shortened(fields)},"):
        return Asked(own_id, encode(**fields), fields)


def asked_of(study: Study, given: Any, number: int, samples: Samples) -> Asked:
    """Return what is asked by a line, a text, or a sample such as the study's ``samples``.

    A mapping of plain values is a line, unless samples are mappings with the same keys and types.
    """
    if isinstance(given, Asked):
        return given
    if isinstance(given, str | bytes):
        return asked_line(study, parsed_line(given), number)
    if isinstance(given, Mapping) and not any(hasattr(v, "__array__") for v in given.values()):
        with users_code("reading the first training sample"):
            own = samples[0]
        if not isinstance(own, Mapping) or _types(own) != _types(given):
            return asked_line(study, given, number)
    return Asked(number, given)


def _types(fields: Mapping[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in fields.items()}

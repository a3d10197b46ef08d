"""Define the functions of a ready-made study, and helpers to read its rows and its arguments."""

import importlib.util
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd
from torch import nn

from trak_core.data.rows import shortened
from trak_core.errors import InputError, listed
from trak_core.study.study import Study


@dataclass(frozen=True, slots=True)
class ReadyStudy:
    """The functions of a study, as ``trak_core.study.study`` documents them.

    ``to_change_samples`` is a message that says which arguments change the samples. ``as_read``
    describes the model's input, so that users can compare it with the input in training.
    ``classes_found`` lists the classes if the data determine the number of the model's outputs.
    ``fields_read`` are the fields of rows from which samples are made. They are not columns.
    """

    to_change_samples: str
    make_model: Callable[[], nn.Module]
    train_data: Callable[[], Any]
    target_data: Callable[[], Any]
    train_ids: Callable[[], Sequence[int | str]]
    target_ids: Callable[[], Sequence[int | str]]
    encode: Callable[..., Any]
    describe: Callable[[Any], str]
    as_read: Callable[[Any], str]
    train_columns: Callable[[], pd.DataFrame]
    target_columns: Callable[[], pd.DataFrame]
    fields_read: Container[str]
    token_texts: Callable[[Any], list[str]] | None = None
    class_names: Callable[[], list[str]] | None = None
    classes_found: str = ""


TO_CHANGE_TEXTS = (
    "The tokenizer in {} must be the model's tokenizer. In study_arguments, `weights` is the "
    "folder of both, and `max_tokens` the length to which texts are cut."
)
UNKNOWN_LABEL = (
    "If the label of a row to explain is unknown, write the class to explain, such as the class "
    "that the model predicts."
)


def notice(text: str) -> None:
    """Print a notice on standard error, because `trak ask` prints answers on standard output."""
    print(f"Notice: {text}", file=sys.stderr, flush=True)


def encoder(
    sample: Callable[[Mapping[str, Any]], Any],
    row: Mapping[str, Any],
    names: Iterable[str],
    class_field: str | None = None,
) -> Callable[..., Any]:
    """Return the study's ``encode``, which converts a line with the fields ``names`` to a sample.

    ``sample`` converts a row. If there is only one name, a line may have the field ``text`` instead
    of it, because ``trak ask`` puts plain text there. Error messages show ``row`` as an example.
    ``class_field`` is the name of the label if it is a class.
    """
    example = {name: row.get(name, "...") for name in names}
    only = next(iter(example)) if len(example) == 1 else "text"

    def encode(**line: Any) -> Any:
        if only not in line and "text" in line:
            line[only] = line.pop("text")
        missing = [name for name in example if name not in line]
        if missing:
            unknown = f" {UNKNOWN_LABEL}" if class_field in missing else ""
            raise InputError(
                f"A row must have all fields that the study reads, such as {shortened(example)}. "
                f"Found no {listed(missing)} in {shortened(line)}.{unknown}",
                code="studies.line",
            )
        return sample(line)

    return encode


_MAX_PIECES = 4  # A character has at most 4 bytes in UTF-8, and therefore at most 4 tokens.


def decoded_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the part of the decoded text that each token adds.

    Joining the parts gives the text of all tokens, with the spaces that ``decode`` omits for a
    single token. If several tokens encode one character, the last one adds the character, and the
    others add "". Each token is decoded with only a few preceding ones, in linear time.
    """

    def decoded(first: int, end: int) -> str:
        # Clean-up would remove a space before some tokens, such as punctuation.
        return tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)

    texts, first, whole = list[str](), 0, 0
    for end in range(1, len(ids) + 1):
        before, text = decoded(first, whole), decoded(first, end)
        is_open = text.endswith("\N{REPLACEMENT CHARACTER}") and end - whole < _MAX_PIECES
        if is_open and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, whole = whole, end
    return texts


def needed(package: str, extra: str) -> None:
    """Raise an InputError that names the extra to install if a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"This study needs the package {package}, which is not installed. Call "
            f"`{Path(sys.executable)} -m pip install {package}`, or install 'trak-core[{extra}]'.",
            code="studies.package",
        )


def function_at(place: str, argument: str) -> Callable[..., Any]:
    """Return the function at ``place``, ``file.py:function``. Errors name the ``argument``."""
    file, _, name = place.rpartition(":")
    path, function = Path(file), None
    if path.suffix == ".py" and path.is_file():
        function = getattr(Study.load(path).module, name, None)
    if not callable(function):
        raise InputError(
            f"study_arguments: {argument} must name a function as file.py:function. Found none at "
            f"{place} (relative to {Path.cwd()}).",
            code="studies.function",
        )
    return function


def used_by(*templates: str | None) -> set[str]:
    """Return the names of the fields in templates such as ``"{prompt}{completion}"``."""
    parts = (part for template in templates if template for part in Formatter().parse(template))
    return {re.split(r"[.\[]", name)[0] for _, name, _, _ in parts if name}


def field(row: Mapping[str, Any], name: str, advice: str = "") -> Any:
    """Return a row's field, or raise an InputError that lists its fields and adds ``advice``."""
    if name not in row:
        raise InputError(
            f"study_arguments: every row must have the field {name}. Found a row with the fields "
            f"{listed(row)}. {advice}".rstrip(),
            code="studies.field",
        )
    return row[name]


def class_numbers(classes: Sequence[Any]) -> dict[str, int]:
    """Return the class number by the text of each label. YAML may have parsed some as numbers."""
    numbers = {str(name): number for number, name in enumerate(classes)}
    if len(numbers) < len(classes):
        raise InputError(
            "study_arguments: the labels in classes must differ from each other. Found "
            f"{', '.join(map(str, classes))}. Put labels such as '01' or '1.10' into quotes, "
            "because YAML would read them as numbers.",
            code="studies.classes",
        )
    return numbers


class _Template(Formatter):
    """A formatter that raises an error for fields other than texts and numbers."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError(f"a {type(value).__name__} in {field_name}: {value!r:.80}")
        return value, first


def filled_in(template: str, row: Mapping[str, Any]) -> str:
    """Return a template such as ``"{prompt} {completion}"`` with a row's fields filled in.

    Numbers are written as in the file. Missing fields and other types of values raise an error.
    """
    row = {key: value for key, value in row.items() if value is not None and value == value}
    try:
        return _Template().vformat(template, (), row)
    except TypeError as error:
        raise InputError(
            f"A field of the template {template!r} must be a text or a number. Found {error}",
            code="studies.value",
        ) from error
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        missing = ", ".join(sorted(used_by(template) - row.keys()))
        raise InputError(
            f"A row must have a value in each field of the template {template!r}. Found none in "
            f"{missing or 'a field'}, and values in {', '.join(row) or 'no field'}. Add the value, "
            "or use other fields in study_arguments, as in text: '{answer}'.",
            code="studies.template",
        ) from error

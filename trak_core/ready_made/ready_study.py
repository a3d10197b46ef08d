"""Define the class of ready-made studies, and functions that these studies have in common."""

import importlib.util
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd
from torch import nn

from trak_core.data.row_files import shortened
from trak_core.errors import InputError, listed
from trak_core.study.study import Study


@dataclass(frozen=True, slots=True)
class ReadyStudy:
    """A study that consists of the functions in its fields.

    The module ``trak_core.study.study`` documents the functions.

    Attributes:
        to_change_samples: A message for errors, which says how to change the samples.
        fields_read: The fields of rows from which samples are made. Other fields become columns.
        classes_found: A message for errors, which lists the classes if they were determined from
            the data.
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
    "folder of model and tokenizer, and `max_tokens` is the length to which texts are cut."
)
UNKNOWN_LABEL = (
    "If the label of a row to explain is unknown, write the class to explain, such as the class "
    "that the model predicts."
)


@cache
def notice(text: str) -> None:
    """Print a notice to standard error, because ``trak ask`` prints answers to standard output.

    A notice is printed once, although a process can read the same study several times.
    """
    print(f"Notice: {text}", file=sys.stderr, flush=True)


def encoder(
    sample: Callable[[Mapping[str, Any]], Any],
    row: Mapping[str, Any],
    names: Iterable[str],
    class_field: str | None = None,
) -> Callable[..., Any]:
    """Return a study's function ``encode``, which converts the fields of a line to a sample.

    The line must have the fields ``names``. If there is only one name, the line may have a field
    ``text`` in its place, because ``trak ask`` puts plain text there. The function ``sample`` then
    makes a sample from the fields. Error messages show values of ``row`` as an example. If the line
    lacks ``class_field``, the message also says what to write for an unknown class.
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
                f"Found no field {listed(missing)} in {shortened(line)}.{unknown}",
                code="studies.line",
            )
        return sample(line)

    return encode


def config_folder(weights: Path, *names: str) -> Path:
    """Return the folder with a model's config: ``weights``, or a Trainer's checkpoint in it.

    The folder contains a file with one of ``names``. If several checkpoints do, it is the last one.
    """
    saved = sorted(weights.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    for folder in (weights, *reversed(saved)):
        if any((folder / name).is_file() for name in names):
            return folder
    raise InputError(
        f"study_arguments: weights must be a folder with {' or '.join(names)}, or with a Trainer's "
        f"checkpoint-<step>. Found none of these in {weights} (relative to {Path.cwd()}).",
        code="studies.weights",
    )


def saved_length(tokenizer: Any, most: int | None) -> int | None:
    """Return the number of tokens to which a fast tokenizer cut texts when it was saved.

    A tokenizer that cuts texts in training writes this number to tokenizer.json. If the file has no
    such number, the tokenizer is assumed to have cut texts to ``model_max_length``, as it does by
    default. Return None if the number exceeds ``most``, the length that the model accepts, or if
    ``model_max_length`` only repeats ``most``.
    """
    most = 10**9 if most is None else most  # An unknown ``model_max_length`` is 10**30.
    truncation = getattr(getattr(tokenizer, "backend_tokenizer", None), "truncation", None)
    length = truncation["max_length"] if truncation else tokenizer.model_max_length
    if length > most or (not truncation and length == most):
        return None
    notice(
        f"texts are cut to {length} tokens, the length to which the saved tokenizer cuts texts. If "
        "training cut texts to another length, set max_tokens in study_arguments."
    )
    return length


_MAX_PIECES = 4  # A character has at most 4 bytes in UTF-8, and therefore at most 4 tokens.


def decoded_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the part of the decoded text that each token adds.

    Joining the parts gives the text of all tokens, with the spaces that ``decode`` omits for a
    single token. If several tokens encode one character, the last one adds the character, and the
    others add "". Time is linear in the number of tokens, because each token is decoded together
    with only a few preceding tokens.
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
    """Raise an InputError if a package is missing. The message names the extra that installs it."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"This study needs the package {package}, which is not installed. Run "
            f"`{Path(sys.executable)} -m pip install {package}`, or install 'trak-core[{extra}]'.",
            code="studies.package",
        )


def function_at(place: str, argument: str) -> Callable[..., Any]:
    """Return the function that ``place`` specifies as ``file.py:function``.

    Error messages name ``argument``, the argument of the study whose value is ``place``.
    """
    file, _, name = place.rpartition(":")
    path, function = Path(file), None
    if path.suffix == ".py" and path.is_file():
        function = getattr(Study.load(path).module, name, None)
    if not callable(function):
        raise InputError(
            f"study_arguments: {argument} must be a function, written as file.py:function. Found "
            f"no function at {place} (relative to {Path.cwd()}).",
            code="studies.function",
        )
    return function


def used_by(*templates: str | None) -> set[str]:
    """Return the names of all fields in templates such as ``"{prompt}{completion}"``."""
    parts = (part for template in templates if template for part in Formatter().parse(template))
    return {re.split(r"[.\[]", name)[0] for _, name, _, _ in parts if name}


def field(row: Mapping[str, Any], name: str, advice: str = "") -> Any:
    """Return a row's field ``name``. If it is missing, raise an InputError with ``advice``."""
    if name not in row:
        raise InputError(
            f"study_arguments: every row must have the field {name}. Found a row with the fields "
            f"{listed(row)}. {advice}".rstrip(),
            code="studies.field",
        )
    return row[name]


def class_numbers(classes: Sequence[Any]) -> dict[str, int]:
    """Return the position of each label in ``classes``, by the text of the label.

    Labels are converted to texts, because YAML parses labels such as ``1`` as numbers.
    """
    numbers = {str(name): number for number, name in enumerate(classes)}
    if len(numbers) < len(classes):
        raise InputError(
            "study_arguments: the labels in classes must differ from each other. Found "
            f"{', '.join(map(str, classes))}. Put labels such as '01' or '1.10' in quotes, "
            "because YAML would read them as numbers.",
            code="studies.classes",
        )
    return numbers


class _Template(Formatter):
    """A string formatter that raises a TypeError if a field is neither a text nor a number."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError(f"a {type(value).__name__} in {field_name}: {value!r:.80}")
        return value, first


def filled_in(template: str, row: Mapping[str, Any]) -> str:
    """Return the text of a template such as ``"{prompt} {completion}"`` with a row's fields.

    Numbers are written as in the file. An InputError is raised if a field is missing, or if its
    value is neither a text nor a number.
    """
    row = {key: value for key, value in row.items() if value is not None and value == value}
    try:
        return _Template().vformat(template, (), row)
    except TypeError as error:
        raise InputError(
            f"A field of the template {template!r} must be a text or a number. Found {error}.",
            code="studies.value",
        ) from error
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        missing = ", ".join(sorted(used_by(template) - row.keys()))
        raise InputError(
            f"A row must have a value in each field of the template {template!r}. Found no value "
            f"in {missing or 'a field'}, and values in {', '.join(row) or 'no field'}. Add the "
            'value, or "" for an empty text, or use other fields in study_arguments, such as text: '
            "'{answer}'.",
            code="studies.template",
        ) from error

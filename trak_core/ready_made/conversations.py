"""Write conversations, lists of messages, as texts by the chat template of a tokenizer."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date as Date
from typing import Any

from trak_core.data.rows import parsed_json
from trak_core.errors import InputError

# What a row may give to a chat template, by the names of transformers and TRL.
ROW_ARGUMENTS = ("tools", "documents", "chat_template_kwargs")
# transformers gives this function to templates, and takes no other in its place.
_TODAY = re.compile(r"""strftime_now\s*\(\s*(['"])([^'"]*)\1\s*\)""")
_NO_DATE = (
    "study_arguments: date must be a day, because the tokenizer's chat template writes today's "
    "date, with which features would change from day to day. Found none. Give the date that "
    "training had, or any other: date: '2024-07-26'."
)
_NO_FORM = (
    "A chat template that writes today's date must call strftime_now with a format in quotes. "
    "Found another call. Write the date into the template that lies with the weights."
)


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """Return the messages in a value, a list of objects with a `role` or the JSON of one.

    None for any other value. Parquet fills in the keys that a message lacks with None; they are
    left out.
    """
    value = _parsed(value)
    if not (isinstance(value, list) and value):
        return None
    if not all(isinstance(message, dict) and "role" in message for message in value):
        return None
    return [
        {key: part for key, part in message.items() if part is not None or key == "content"}
        for message in value
    ]


def _parsed(value: Any) -> Any:
    """Return the list or object that a text is the JSON of, as in a cell of a table."""
    if isinstance(value, str) and value.lstrip()[:1] in {"[", "{"}:
        with suppress(ValueError):
            return parsed_json(value)
    return value


def chat_texts(
    tokenizer: Any,
    prompt: Sequence[dict[str, Any]],
    answer: Sequence[dict[str, Any]],
    row: Mapping[str, Any],
    date: str | None,
) -> tuple[str, str]:
    """Return a conversation up to the answer, and with the answer, as the model reads them.

    Args:
        tokenizer: One of transformers' with a chat template.
        prompt: The messages before the answer, one at least.
        answer: The messages that count. The last one must be the assistant's.
        row: Its fields ``tools``, ``documents`` and ``chat_template_kwargs`` go to the template.
        date: The day, as in 2024-07-26, that a template gets which writes today's date.

    Raises:
        InputError: If the template can't write this conversation, or writes its first part
            otherwise where an answer follows.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "The tokenizer of a model that is asked by messages must have a chat template. Found "
            "none. Write prompt and text into fields of their own, or save the tokenizer of the "
            "training with the weights.",
            code="studies.chat_template",
        )
    if not prompt or not answer or answer[-1]["role"] != "assistant":
        roles = ", ".join(str(message["role"]) for message in [*prompt, *answer])
        raise InputError(
            "A conversation must have a message before its last one, which must be the "
            f"assistant's, because the last one is explained. Found messages of: {roles}. Leave "
            "out what follows the assistant's last message, or leave out the row.",
            code="studies.chat_roles",
        )
    given = {name: _parsed(row[name]) for name in ROW_ARGUMENTS if row.get(name)}
    arguments = {**given, **given.pop("chat_template_kwargs", {}), "tokenize": False}
    arguments["chat_template"] = _dated(tokenizer.get_chat_template(tools=given.get("tools")), date)
    try:
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **arguments)
        whole = tokenizer.apply_chat_template([*prompt, *answer], **arguments)
    except MemoryError:
        raise
    except Exception as error:  # whatever the template, which is code of the model, raises
        is_dated = str(error) in {_NO_DATE, _NO_FORM}
        fails = "" if is_dated else "The tokenizer's chat template must write the row's messages: "
        code = "studies.chat_date" if is_dated else "studies.chat_template"
        raise InputError(f"{fails}{error}", code=code) from error
    if not whole.startswith(before):
        raise InputError(
            "A chat's template must write a conversation as it begins, whatever follows. Found "
            f"{before[-40:]!r} before the answer, {whole[: len(before)][-40:]!r} with it. "
            "Write prompt and text into fields of their own, in the model's form.",
            code="studies.chat_template",
        )
    return before, whole


def _dated(template: str, date: str | None) -> str:
    """Return a template that writes ``date`` in place of today's date, or fails without one."""
    try:
        day = None if date is None else Date.fromisoformat(date)
    except ValueError as error:
        raise InputError(
            f"study_arguments: date must be a day such as '2024-07-26'. Found {date!r}.",
            code="studies.chat_date",
        ) from error
    if day is not None:
        template = _TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    # A macro hides the function of transformers in every call that is left.
    fails = _NO_DATE if day is None else _NO_FORM
    macro = (
        f"{{% macro strftime_now(format) %}}{{{{ raise_exception({fails!r}) }}}}{{% endmacro %}}"
    )
    return f"{macro}\n{template}"

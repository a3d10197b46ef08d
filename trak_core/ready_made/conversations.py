"""Convert conversations (lists of messages) to texts with the chat template of a tokenizer."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date as Date
from typing import Any

from trak_core.data.rows import parsed_json
from trak_core.errors import InputError

# Fields of a row that are passed to the chat template, with their types. transformers and TRL use
# the same names.
ROW_ARGUMENTS = {"tools": list, "documents": list, "chat_template_kwargs": dict}
# transformers defines ``strftime_now`` for templates, and callers cannot replace it.
_TODAY = re.compile(r"""strftime_now\s*\(\s*(['"])([^'"]*)\1\s*\)""")
_NO_DATE = (
    "study_arguments: date must be given if the tokenizer's chat template writes today's date, "
    "because features would then change from day to day. Give the date that was used in training, "
    "or any other date, such as date: '2024-07-26'. If a date is given, the template calls "
    "strftime_now without a format in quotes. Replace this call by a fixed date."
)


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """Return the messages in a list of objects with a `role`, or in the JSON of such a list.

    Return None for any other value. Keys with the value None are removed, except `content`. Parquet
    adds such keys to a row if other rows have them. TRL removes them too.
    """
    value = _parsed(value)
    if not (isinstance(value, list) and value):
        return None
    if not all(isinstance(message, dict) and "role" in message for message in value):
        return None
    return [
        {k: _without_none(v) for k, v in message.items() if v is not None or k == "content"}
        for message in value
    ]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _parsed(value: Any) -> Any:
    """Parse a text that is the JSON of a list or an object. Return any other value unchanged."""
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
    notify: Callable[[str], None],
) -> tuple[str, str]:
    """Return the text of a conversation up to the answer, and the text of all of its messages.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        prompt: The messages before the answer, at least one.
        answer: The messages to explain. The last one has the role `assistant`.
        row: The row with the messages. Its fields in ``ROW_ARGUMENTS`` are passed to the template.
        date: A date such as 2024-07-26, which a template writes instead of today's date.
        notify: A function that is called with a sentence if the template omits a message.

    Raises:
        InputError: If the template raises an error, writes a message's text as a Python literal, or
            writes the prompt differently if an answer follows.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "The tokenizer must have a chat template if rows have messages. Found none. Write "
            "prompt and text into separate fields, or save the tokenizer that was used in training "
            "with the weights.",
            code="studies.chat_template",
        )
    if not prompt or not answer or answer[-1]["role"] != "assistant":
        roles = ", ".join(str(message["role"]) for message in [*prompt, *answer])
        raise InputError(
            "A conversation must have at least two messages, and the last one must be the "
            f"assistant's, because it is explained. Found the roles {roles}. Remove the "
            "messages after the assistant's last message, or remove the row.",
            code="studies.chat_roles",
        )
    messages = [*prompt, *answer]
    for message in messages:  # Templates write nothing or "None" for a message without text.
        if message.get("content") is None and not message.get("tool_calls"):
            raise InputError(
                "A message must have its text in `content`, or have `tool_calls`. Found a message "
                f"with the role {message['role']!r} and the fields {', '.join(message)}.",
                code="studies.messages",
            )
    given = _row_arguments(row)
    arguments = {**given, **given.pop("chat_template_kwargs", {}), "tokenize": False}
    arguments["chat_template"] = _dated(tokenizer.get_chat_template(tools=given.get("tools")), date)

    def written(messages: Sequence[dict[str, Any]], **more: Any) -> str:
        return tokenizer.apply_chat_template(messages, **more, **arguments)

    try:
        before, whole = written(prompt, add_generation_prompt=True), written(messages)
        _refuse_python(messages, whole, written)
    except (MemoryError, InputError):
        raise
    except Exception as error:  # A template is code, and can raise any error.
        is_dated = str(error) == _NO_DATE
        fails = "" if is_dated else "The chat template must accept the row's messages. It failed: "
        code = "studies.chat_date" if is_dated else "studies.chat_template"
        raise InputError(f"{fails}{error}", code=code) from error
    if not whole.startswith(before):
        raise InputError(
            "A chat template must write the beginning of a conversation in the same way with and "
            f"without an answer. Found {before[-40:]!r} without an answer, and "
            f"{whole[: len(before)][-40:]!r} with one. Write prompt and text into separate fields, "
            "in the format that the model needs.",
            code="studies.chat_template",
        )
    for message in messages:
        text = message.get("content")
        # Templates of reasoning models omit the reasoning in assistants' messages.
        if isinstance(text, str) and message["role"] != "assistant" and text.strip() not in whole:
            notify(
                f"the chat template omits or changes the content of a message with the role "
                f"{message['role']!r}: {text.strip()[:40]!r}."
            )
    return before, whole


def _row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: _without_none(_parsed(row[name])) for name in ROW_ARGUMENTS if row.get(name)}
    for name, value in given.items():
        if not isinstance(value, ROW_ARGUMENTS[name]):
            raise InputError(
                f"The field {name} must be a {ROW_ARGUMENTS[name].__name__} or its JSON, because "
                f"it is passed to the chat template. Found {value!r:.80}.",
                code="studies.messages",
            )
    return given


def _refuse_python(
    messages: Sequence[dict[str, Any]], whole: str, written: Callable[..., str]
) -> None:
    """Raise an error if a template writes contents, such as lists of parts, as Python literals."""
    for i, message in enumerate(messages):
        content = message.get("content", "")
        if isinstance(content, str) or str(content) not in whole:
            continue
        others = [*messages[:i], {**message, "content": ""}, *messages[i + 1 :]]
        if whole.count(str(content)) > written(others).count(str(content)):
            raise InputError(
                "The content of a message must be a text, because the chat template writes any "
                f"other content as a Python literal. Found {content!r:.80}.",
                code="studies.messages",
            )


def _dated(template: str, date: str | None) -> str:
    """Return a template that writes ``date`` instead of today's date.

    If ``date`` is None, the template raises an error where it would write today's date.
    """
    try:
        day = None if date is None else Date.fromisoformat(date)
    except ValueError as error:
        raise InputError(
            f"study_arguments: date must be a day such as '2024-07-26'. Found {date!r}.",
            code="studies.chat_date",
        ) from error
    if day is not None:
        template = _TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    # Calls that were not replaced above reach this macro, which hides transformers' function.
    fails = f"{{{{ raise_exception({_NO_DATE!r}) }}}}"
    macro = f"{{% macro strftime_now(format) %}}{fails}{{% endmacro %}}"
    return f"{macro}\n{template}"

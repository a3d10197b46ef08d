"""Convert conversations (lists of messages) to texts with the chat template of a tokenizer."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date as Date
from typing import Any

from trak_core.data.row_files import parsed_json
from trak_core.errors import InputError

# The fields of a row that are passed to the chat template, with the type of each. transformers and
# TRL use the same names.
ROW_ARGUMENTS = {"tools": list, "documents": list, "chat_template_kwargs": dict}
# A chat template calls ``strftime_now`` to write today's date. transformers defines this function,
# and callers cannot replace it. The call is therefore replaced in the text of the template.
_TODAY = re.compile(r"""strftime_now\s*\(\s*(['"])([^'"]*)\1\s*\)""")
_NO_DATE = (
    "study_arguments: date must be given if the tokenizer's chat template writes today's date, "
    "because features would then change from day to day. Give the date that was used in training, "
    "or any other date, such as date: '2024-07-26'. If a date is given already, the template calls "
    "strftime_now without a format in quotes. Replace this call by a fixed date in the template."
)


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """Return the chat messages in a value, or None if the value is not a list of messages.

    ``value`` is a list of dicts that each have a `role`, or the JSON text of such a list.
    """
    value = _parsed(value)
    if not (isinstance(value, list) and value):
        return None
    if not all(isinstance(message, dict) and "role" in message for message in value):
        return None
    return value


def _parsed(value: Any) -> Any:
    """Return the list or object that a JSON text contains. Return any other value unchanged."""
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
    """Return the text of a conversation before its answer, and the text of the whole conversation.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        prompt: The messages before the answer, at least one.
        answer: The messages to explain. The last one has the role `assistant`.
        row: The row that contains the messages. Its fields ``tools``, ``documents`` and
            ``chat_template_kwargs`` are passed to the template.
        date: A date such as "2024-07-26", which the template writes instead of today's date.
        notify: A function that is called with a sentence if the template omits a message's text.

    Raises:
        InputError: If the template is missing or fails, if it writes the content of a message as a
            Python literal, or if it writes the prompt differently when an answer follows.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "The tokenizer must have a chat template if rows contain messages. Found none. Save "
            "the tokenizer that was used in training in the folder of the weights, or write prompt "
            "and text into separate fields.",
            code="studies.chat_template",
        )
    if not prompt or not answer or answer[-1]["role"] != "assistant":
        roles = ", ".join(str(message["role"]) for message in [*prompt, *answer])
        raise InputError(
            "A conversation must have at least two messages. The last one must have the role "
            f"assistant, because it is explained. Found the roles {roles}. Remove the messages "
            "after the assistant's last message, or remove the row.",
            code="studies.chat_roles",
        )
    messages = [*prompt, *answer]
    for message in messages:  # For a message without text, templates write nothing or "None".
        if message.get("content") is None and not message.get("tool_calls"):
            raise InputError(
                "A message must have its text in `content`, or have `tool_calls`. Found a message "
                f"with the role {message['role']!r} and the fields {', '.join(message)}.",
                code="studies.messages",
            )
    given = _row_arguments(row)
    if _has_null([given.get("tools", []), *(m.get("tool_calls") or [] for m in messages)]):
        notify(
            "tools or tool calls of a row contain null, which is passed to the chat template. If "
            "training removed such values, as TRL does, remove them from the file."
        )
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
            "A chat template must write the messages before an answer in the same way, whether or "
            f"not the answer follows. Found {before[-40:]!r} without the answer, and "
            f"{whole[: len(before)][-40:]!r} with the answer. Write prompt and text into separate "
            "fields, in the format that the model needs.",
            code="studies.chat_template",
        )
    for message in messages:
        text = message.get("content")
        # Messages of the assistant are not checked, because templates of reasoning models omit the
        # reasoning in them.
        if isinstance(text, str) and message["role"] != "assistant" and text.strip() not in whole:
            notify(
                f"the chat template omits or changes the content of a message with the role "
                f"{message['role']!r}: {text.strip()[:40]!r}."
            )
    return before, whole


def _has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_null, value.values() if isinstance(value, dict) else value))
    return value is None


def _row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: _parsed(row[name]) for name in ROW_ARGUMENTS if row.get(name)}
    for name, value in given.items():
        if not isinstance(value, ROW_ARGUMENTS[name]):
            raise InputError(
                f"The field {name} must be a {ROW_ARGUMENTS[name].__name__} or the JSON of one, "
                f"because it is passed to the chat template. Found {value!r:.80}.",
                code="studies.messages",
            )
    return given


def _refuse_python(
    messages: Sequence[dict[str, Any]], whole: str, written: Callable[..., str]
) -> None:
    """Raise an error if the chat template wrote the content of a message as a Python literal.

    Templates do so if they expect a text, but the content is, for example, a list of parts.
    """
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
    """Return the chat template, changed so that it writes ``date`` instead of today's date.

    If ``date`` is None, the new template raises an error where it would write today's date.
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
    # This macro replaces transformers' function of the same name. It raises an error for calls in
    # the template that were not replaced above.
    fails = f"{{{{ raise_exception({_NO_DATE!r}) }}}}"
    macro = f"{{% macro strftime_now(format) %}}{fails}{{% endmacro %}}"
    return f"{macro}\n{template}"

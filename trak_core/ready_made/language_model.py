"""Define the study of a causal language model, from a folder of weights and a file of texts."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.data.row_files import RowFile, RowSamples, read_rows, shortened
from trak_core.errors import InputError
from trak_core.ready_made.conversations import ROW_ARGUMENTS, chat_texts, messages_in
from trak_core.ready_made.ready_study import (
    TO_CHANGE_TEXTS,
    ReadyStudy,
    config_folder,
    decoded_tokens,
    encoder,
    filled_in,
    needed,
    notice,
    saved_length,
    used_by,
)
from trak_core.settings import ADAPTER_CONFIG
from trak_core.study.load_checkpoint import read_weights
from trak_core.study.sample_columns import columns_from
from trak_core.study.weight_files import ADAPTER_WEIGHTS, refuse_quantized

# A field is treated as a misspelling of "prompt" if difflib's ratio of the two names is at least
# this number. The ratio is higher for "promt" and "prompts", and lower for "prompt_id".
_NEAR = 0.83
_TEXT, _COMPLETION, _PROMPT = "{text}", "{completion}", "{prompt}"  # The default templates.


def language_model(
    texts: str,
    weights: str,
    targets: str | None = None,
    text: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
    date: str | None = None,
) -> ReadyStudy:
    """Return the study of a language model that was trained on texts.

    Args:
        texts: The file with the training rows, or the folder of a saved ``datasets.Dataset``.
        weights: The folder of a model, of a LoRA adapter, or of a Trainer's checkpoints, with its
            config and tokenizer.
        targets: A file of rows to explain, which experiments select by id. It is not needed for
            experiments with ``data``.
        text: A template of the text to explain, such as ``"{completion}"``, into which a row's
            fields are inserted. The default is the last message in the field ``messages`` if a row
            has it, else the field ``text``, or ``completion`` if no row has a ``text``.
        prompt: A template of the prompt, which precedes the text and is not part of the model
            output. The default is the field ``prompt``, if a row has one. If the prompt and the
            text are lists of messages, as in TRL, the tokenizer's chat template joins them.
        max_tokens: The number of tokens to which texts are cut. The default is the length to which
            the tokenizer cut texts when it was saved, or else its ``model_max_length``. If this
            exceeds the model's context, texts are not cut, and texts that are longer than the
            context raise an error.
        date: A date such as ``"2024-07-26"``, which a chat template writes instead of today's date.

    Raises:
        InputError: If a row has two texts or two prompts, because one of them would be ignored.
    """
    needed("transformers", "language")
    from transformers import AutoConfig, AutoTokenizer

    folder = config_folder(Path(weights), "config.json", ADAPTER_CONFIG)
    tokenizer: Any = AutoTokenizer.from_pretrained(
        _tokenizer_source(folder), trust_remote_code=False
    )
    if not tokenizer.is_fast:
        raise InputError(
            "The tokenizer must be a fast tokenizer, because slow ones do not return the offsets "
            f"of tokens in the text. Found {type(tokenizer).__name__}. Write your own study.",
            code="studies.slow_tokenizer",
        )
    config: Any = AutoConfig.from_pretrained(_base(folder) or folder, trust_remote_code=False)
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    max_tokens = max_tokens or saved_length(tokenizer, context)
    rows = read_rows(texts)
    fields = {name for row in rows for name in row}
    used = used_by(prompt, text) | {"messages", *ROW_ARGUMENTS}
    used |= {"prompt"} if prompt is None else set()
    used |= {"text", "completion"} if text is None else set()
    notified: set[str] = set()

    def notify(text: str, about: str) -> None:
        """Print a notice, unless an earlier notice had the same ``about``."""
        if about not in notified:
            notified.add(about)
            notice(text)

    def template_of(row: Mapping[str, Any]) -> str:
        has_completion = "text" not in fields and ("completion" in fields or "completion" in row)
        return text or (_COMPLETION if has_completion else _TEXT)

    def chat(prompt: Any, answer: Any, row: Mapping[str, Any]) -> tuple[str, str, bool]:
        notify_of_chat = partial(notify, about="the chat template")
        return *chat_texts(tokenizer, prompt, answer, row, date, notify_of_chat), True

    def texts_of(row: Mapping[str, Any]) -> tuple[str, str, bool]:
        """Return the prompt, the prompt with its text, and whether a chat template wrote both."""
        if has_messages(row):
            messages = messages_in(row["messages"])
            if messages is None or row.get("text") is not None:
                raise InputError(
                    "The field `messages` must be a list of objects with `role` and `content`. A "
                    f"row with `messages` must have no field `text`. Found {shortened(row)}. "
                    "Remove the row if its conversation is empty. If another field contains the "
                    "text to explain, set `text` in study_arguments to a template with this field, "
                    "such as text: '{answer}'.",
                    code="studies.messages",
                )
            _refuse_unread(row, {"completion", "prompt"} | used_by(prompt), messages)
            return chat(messages[:-1], messages[-1:], row)
        texts_given = [name for name in ("text", "completion") if row.get(name) is not None]
        if text is None and len(texts_given) == 2:
            raise InputError(
                "A row must have only one text. Found the fields text and completion. To choose "
                "the field to explain, set text: '{text}' or text: '{completion}' in "
                "study_arguments. If the field also contains the prompt, set prompt: '' too.",
                code="studies.two_texts",
            )
        if prompt is None and "prompt" not in row:
            _refuse_near_prompt([name for name in row if name not in used])
        usual = "" if row.get("prompt") is None else _PROMPT
        own = usual if prompt is None else prompt
        template = template_of(row)
        answer, asked = (messages_in(row.get(_only_field(part))) for part in (template, own))
        if answer and not own:  # The field contains a whole conversation.
            asked, answer = answer[:-1], answer[-1:]
        if answer is not None and asked is not None:
            return chat(asked, answer, row)
        if answer or asked:
            raise InputError(
                "A row's prompt and text must both be lists of messages, or both be plain texts. "
                f"Found messages only in {template if answer else own}.",
                code="studies.chat_roles",
            )
        before, after = filled_in(own, row), filled_in(template, row)
        if _runs_on(before, after):
            joined = f"{before.split()[-1]}{after.split()[0]}"
            notify(
                f"a prompt and its text are joined without a space, into {joined[:80]!r}. "
                "If training had a space between them, the text must begin with this space.",
                about="spaces",
            )
        return before, before + after, False

    def sample(row: Mapping[str, Any]) -> dict[str, Tensor]:
        before, whole, is_chat = texts_of(row)
        tokens = tokenizer(
            whole,
            return_offsets_mapping=True,
            add_special_tokens=not is_chat,  # The chat template has written them already.
            truncation=max_tokens is not None,
            max_length=max_tokens,
        )
        ids, offsets = tokens["input_ids"], tokens["offset_mapping"]
        if ids[:2] == [tokenizer.bos_token_id] * 2 and whole.startswith(tokenizer.bos_token):
            ids, offsets = ids[1:], offsets[1:]  # The text itself begins with a start token.
        if max_tokens is None and context is not None and len(ids) > context:
            raise InputError(
                f"A text must fit into the model's context of {context} tokens. Found {len(ids)} "
                f"tokens in the text that begins with {whole[:40]!r}. Set max_tokens in "
                f"study_arguments to the length to which training cut texts, such as max_tokens: "
                f"{context}. If training did not cut texts, set max_tokens: {len(ids)}.",
                code="studies.context",
            )
        input_ids = torch.tensor(ids, dtype=torch.long)
        # Tokens that the tokenizer adds, such as an end token, have the offsets (0, 0). They must
        # not be counted as a part of the prompt.
        in_prompt = [i for i, (_, end) in enumerate(offsets) if 0 < end <= len(before)]
        if in_prompt and before[-1] == " " and not is_chat and "joined tokens" not in notified:
            alone = tokenizer(before, add_special_tokens=False)["input_ids"]
            if alone and alone[-1] != ids[in_prompt[-1]]:
                notify(
                    "a prompt ends with a space, which the tokenizer joins with the first word of "
                    "the text. The joined token counts as text. If training converted prompts and "
                    "texts to tokens separately, its tokens differ. Then write your own study.",
                    about="joined tokens",
                )
        labels = input_ids.clone()
        labels[: max(in_prompt, default=-1) + 1] = -100
        if (labels == -100).all():
            raise InputError(
                "A row must have at least one token of text after its prompt. Found none in "
                f"{shortened(row)}. Check whether the text is empty, or is cut off by max_tokens.",
                code="studies.empty_text",
            )
        return {"input_ids": input_ids, "labels": labels}

    def has_messages(row: Mapping[str, Any]) -> bool:
        return text is None and row.get("messages") is not None

    def is_chat(row: Mapping[str, Any]) -> bool:
        answer = messages_in(row.get(_only_field(template_of(row))))
        return has_messages(row) or answer is not None

    @cache
    def has_only_chats() -> bool:
        return all(map(is_chat, rows))

    def asked_sample(row: Mapping[str, Any]) -> dict[str, Tensor]:
        if not is_chat(row) and has_only_chats():
            notify(
                f"a row to explain is a plain text, unlike training rows: {shortened(row)}. It is "
                "read without the chat template. To use the template, give a conversation, such as "
                '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
                '"content": "..."}]}.',
                about="a plain asked text",
            )
        return sample(row)

    def has_empty_text(row: Mapping[str, Any]) -> bool:
        """Return whether the fields of a row that contain the text to explain are all empty."""
        names = ["messages"] if has_messages(row) else used_by(template_of(row))
        given = [row.get(name) for name in names]
        lasts = [messages[-1] if (messages := messages_in(value)) else value for value in given]
        parts = [
            m.get("tool_calls") or m.get("content") if isinstance(m, dict) else m for m in lasts
        ]
        return all(isinstance(part, str) and not part.strip() for part in parts)

    def encode(**row: Any) -> dict[str, Tensor]:
        if has_empty_text(row):
            notify(
                f"a text to explain is empty: {shortened(row)}. Only characters that the template "
                "adds are explained.",
                about="an empty asked text",
            )
        if lacks_prompt(row):
            notify(
                f"a row to explain has no prompt, unlike training rows: {shortened(row)}. Its "
                "whole text is explained.",
                about="an asked row without a prompt",
            )
        if has_messages(row):
            return asked_sample(row)
        names = sorted(used_by(prompt, template_of(row)))
        return encoder(asked_sample, rows[0], names)(**row)

    def has_earlier_answers(row: Mapping[str, Any]) -> bool:
        """Return whether a row has messages of the assistant before the one to explain."""
        has_prompt = row.get("prompt") is not None if prompt is None else bool(prompt)
        field = "" if has_prompt else _only_field(template_of(row))
        messages = messages_in(row.get("messages" if has_messages(row) else field)) or []
        return any(message["role"] == "assistant" for message in messages[:-1])

    def lacks_prompt(row: Mapping[str, Any]) -> bool:
        is_text = row.get("prompt") is None and row.get("messages") is None
        return prompt is None and "prompt" in fields and is_text

    seen = {
        "have an empty text": (
            has_empty_text,
            "Only characters that the template adds are explained in such rows. Remove these rows "
            "if the model was not trained on them.",
        ),
        "have no prompt, unlike other rows": (lacks_prompt, "Their whole text is explained."),
        "have earlier messages of the assistant": (
            has_earlier_answers,
            "Only the last message of a row is explained. If training also computed the loss of "
            "the earlier messages, write one row for each message of the assistant, and end the "
            "row with this message.",
        ),
    }

    def train_data() -> RowSamples:
        samples = RowSamples(rows, sample)
        for about, (is_so, consequence) in seen.items():
            if numbers := [i for i, row in enumerate(rows) if is_so(row)]:
                notify(
                    f"{len(numbers)} of {len(rows)} training rows {about}. The first is "
                    f"{rows.place(numbers[0])}. {consequence}",
                    about,
                )
        if max_tokens is None:
            # The longest text is read now, because it is the most likely one to exceed the context.
            # Otherwise the error would occur only after other samples have been processed.
            lengths = [sum(len(str(row.get(name, ""))) for name in used) for row in rows]
            samples[lengths.index(max(lengths))]
        return samples

    def target_rows() -> RowFile:
        if targets is None:
            raise InputError(
                "study_arguments: targets must be a file of rows if an experiment selects targets "
                "by id. Found no targets. Set targets, or set `data: asked.jsonl` in the "
                "experiment.",
                code="studies.no_targets",
            )
        return read_rows(targets)

    def parts(sample: Mapping[str, Tensor], **how: Any) -> list[str]:
        ids, n_before = sample["input_ids"].tolist(), int((sample["labels"] == -100).sum())
        return [tokenizer.decode(part, **how) for part in (ids[:n_before], ids[n_before:])]

    def as_read(sample: Mapping[str, Tensor]) -> str:
        before, counted = parts(sample)
        return f"{before!r}, then the text to explain: {counted!r}" if before else repr(counted)

    def describe(sample: Mapping[str, Tensor]) -> str:
        before, counted = parts(sample, skip_special_tokens=True)
        return f"prompt: {before}\nanswer: {counted.removeprefix(' ')}" if before else counted

    return ReadyStudy(
        to_change_samples=TO_CHANGE_TEXTS.format(weights),
        make_model=lambda: _model(folder),
        train_data=train_data,
        train_ids=rows.ids,
        target_data=lambda: RowSamples(target_rows(), sample),
        target_ids=lambda: target_rows().ids(),
        encode=encode,
        describe=describe,
        as_read=as_read,
        token_texts=lambda sample: decoded_tokens(tokenizer, sample["input_ids"].tolist()),
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows(), used),
        fields_read=used,
    )


def _only_field(template: str) -> str:
    """Return "text" for the template ``"{text}"``, and "" if a template is not a single field."""
    return next((name for name in used_by(template) if template == f"{{{name}}}"), "")


def _refuse_unread(
    row: Mapping[str, Any], names: Iterable[str], messages: Sequence[Mapping[str, Any]]
) -> None:
    """Raise an error if a field in ``names`` has a text that is not one of the row's messages."""
    contents = ["", *(str(message.get("content")).strip() for message in messages)]
    for name in sorted(names):
        given = messages_in(row.get(name)) or [{"content": row.get(name)}]
        texts = ["" if part.get("content") is None else str(part["content"]) for part in given]
        if any(text.strip() not in contents for text in texts):
            raise InputError(
                f"A row must have either the field messages or the field {name}. Found both, with "
                "different texts. Remove or rename one of the fields.",
                code="studies.two_texts",
            )


def _refuse_near_prompt(names: Sequence[str]) -> None:
    """Raise an error for a field with a name similar to ``prompt``, which would be ignored."""
    for name in names:
        if get_close_matches(name.strip().casefold(), ["prompt"], cutoff=_NEAR):
            raise InputError(
                f"A row's prompt must be in a field named prompt. Found the field {name!r}, which "
                "would be ignored. Rename it. If it is not a prompt, set prompt: '' in "
                "study_arguments.",
                code="studies.near_prompt",
            )


def _runs_on(before: str, after: str) -> bool:
    """Return whether the last word of a text would merge with the first word of the next text.

    Only scripts with capital letters are checked, because others may have no spaces between words.
    """
    ends = before[-1:], after[:1]
    return all(end and unicodedata.category(end) in {"Lu", "Ll", "Nd"} for end in ends)


def _base(folder: Path) -> str | None:
    """Return the folder of an adapter's base model, or None if ``folder`` contains no adapter.

    A relative path is resolved in the adapter's folder, or else in the working directory. A model
    on the Hugging Face Hub must already be in the local cache, because jobs may have no network.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    from huggingface_hub import try_to_load_from_cache

    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    base = str(settings.get("base_model_name_or_path"))
    for path in (folder / base, Path(base)):
        if path.is_dir():
            return str(path)
    cached = None
    with suppress(ValueError):  # Raised for a path, because it isn't a valid name on the hub.
        cached = try_to_load_from_cache(base, "config.json", revision=settings.get("revision"))
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise InputError(
        f"{folder / ADAPTER_CONFIG}: base_model_name_or_path must be a folder (relative to the "
        f"adapter's folder or to {Path.cwd()}) or a model in the cache of the Hugging Face Hub. "
        f"Found {base}. Copy the base model to this path, or load the model and the tokenizer once "
        "with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.",
        code="studies.adapter_base",
    )


def _tokenizer_source(folder: Path) -> str:
    """Return the folder of the tokenizer: ``folder``, its parent, or an adapter's base model."""
    for path in (folder, folder.parent):
        if (path / "tokenizer_config.json").is_file():
            return str(path)
    base = _base(folder)
    if base is None:
        raise InputError(
            f"study_arguments: the folder of weights must have a tokenizer. Found none in {folder} "
            f"or {folder.parent}. Save it: `tokenizer.save_pretrained({str(folder)!r})`.",
            code="studies.tokenizer",
        )
    return base


def _model(folder: Path) -> nn.Module:
    """Return the model that ``folder`` describes. A checkpoint replaces its weights later.

    If ``folder`` contains an adapter, the model is the base model with its weights, to which the
    adapter's layers are added.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    base = _base(folder)
    if base is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    needed("peft", "language")
    from peft import PeftConfig, get_peft_model

    refuse_quantized(Path(base))
    model: Any = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False)
    config: Any = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = base  # Otherwise peft warns that the name differs.
    config.inference_mode = False  # Otherwise peft freezes the adapter.
    if any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        _resize_embeddings(model, read_weights(folder).state)
    return get_peft_model(model, config)


def _resize_embeddings(model: Any, adapter: Mapping[str, Tensor]) -> None:
    """Give the model as many token embeddings as the weights of an adapter contain.

    If tokens were added in training, peft saves all embeddings with the adapter.
    """
    embeddings = model.get_input_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is embeddings)
    saved = re.compile(rf"(.*\.)?{re.escape(name)}(\.(modules_to_save|base_layer))?\.weight")
    rows = {len(weight) for key, weight in adapter.items() if saved.fullmatch(key)}
    if len(rows) == 1 and rows != {embeddings.num_embeddings}:
        model.resize_token_embeddings(rows.pop(), mean_resizing=False)

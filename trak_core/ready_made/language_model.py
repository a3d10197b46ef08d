"""Study a causal language model of Hugging Face's: weights, a file of texts, nothing else."""

import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.data.rows import RowFile, read_rows, shortened
from trak_core.errors import InputError
from trak_core.ready_made.conversations import ROW_ARGUMENTS, chat_texts, messages_in
from trak_core.ready_made.pretrained import from_folder
from trak_core.ready_made.ready_study import (
    ReadyStudy,
    Rows,
    columns_from,
    decoded_tokens,
    encoder,
    filled_in,
    needed,
    used_by,
)
from trak_core.spec import ADAPTER_CONFIG
from trak_core.study.weight_files import refuse_quantized

# "Prompt", "promt" and "prompts" are nearer to "prompt", "prompt_id" isn't.
_NEAR = 0.83


def language_model(
    texts: str,
    weights: str,
    targets: str | None = None,
    text: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
    date: str | None = None,
) -> ReadyStudy:
    """Return the study of texts that trained a language model.

    Args:
        texts: The training rows: ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``.
        weights: A folder with the model's ``config.json`` and tokenizer: of the model, of a LoRA
            adapter, or one in which a Trainer saved several.
        targets: Rows to explain, by id; not needed where experiments bring ``data`` of their own.
        text: What counts, a template with fields of a row such as ``"{completion}"``. If not given,
            the last message of a conversation in the field ``messages``, or the field ``text``, or
            ``completion`` where no row has a ``text``.
        prompt: What comes before and doesn't count, likewise. If not given, the field ``prompt`` of
            the rows that have one. Where the fields of both are lists of messages, as TRL writes
            them, the tokenizer's chat template joins them.
        max_tokens: Where to cut longer texts; if not given, all stay whole.
        date: The day, such as ``"2024-07-26"``, for a chat template that writes today's date.
    """
    needed("transformers", "language")
    from transformers import AutoConfig, AutoTokenizer

    folder = _config_folder(Path(weights))
    tokenizer: Any = from_folder(AutoTokenizer.from_pretrained, _tokenizer_source(folder))
    if not tokenizer.is_fast:
        raise InputError(
            "The tokenizer must be a fast one, which tells where each token is in the text. Found "
            f"{type(tokenizer).__name__}, which is none. Write a study of your own.",
            code="studies.slow_tokenizer",
        )
    rows = read_rows(texts)
    template = text or _default_text(rows)
    used = used_by(prompt, template) | {"messages", *ROW_ARGUMENTS}
    used |= {"prompt"} if prompt is None else set()
    told: set[bool] = set()

    def texts_of(row: Mapping[str, Any], *, is_asked: bool) -> tuple[str, str, bool]:
        """Return what comes before, all of it, and whether a chat template wrote it."""
        if text is None and row.get("messages") is not None:
            messages = messages_in(row["messages"])
            if messages is None or row.get("text") is not None:
                raise InputError(
                    "The field messages must be a list of objects with `role` and `content`, in a "
                    "row without `text`, unless `text` in study_arguments names the field that "
                    f"counts. Found {shortened(row)}.",
                    code="studies.messages",
                )
            return *chat_texts(tokenizer, messages[:-1], messages[-1:], row, date), True
        if prompt is None and "prompt" not in row:
            _refuse_near_prompt([name for name in row if name not in used])
        own = "" if row.get("prompt") is None else "{prompt}"  # ruff: ignore[missing-f-string-syntax]
        own = own if prompt is None else prompt
        answer, asked = (messages_in(row.get(_only_field(part))) for part in (template, own))
        if answer and not own:  # a whole conversation
            asked, answer = answer[:-1], answer[-1:]
        if answer is not None and asked is not None:
            return *chat_texts(tokenizer, asked, answer, row, date), True
        if answer or asked:
            raise InputError(
                "Prompt and text must both be lists of messages, or both be texts. Found messages "
                f"in {template if answer else own} alone.",
                code="studies.chat_roles",
            )
        before, after = filled_in(own, row), filled_in(template, row)
        if _runs_on(before, after) and is_asked not in told:
            told.add(is_asked)
            joined = f"{before.split()[-1]}{after.split()[0]}"
            print(
                f"Notice: a prompt and its text are joined without a space, into {joined[:80]!r}. "
                "If a space was between them in training, the text must begin with it.",
                file=sys.stderr,
                flush=True,
            )
        return before, before + after, False

    def sample(row: Mapping[str, Any], *, is_asked: bool = False) -> dict[str, Tensor]:
        before, whole, is_chat = texts_of(row, is_asked=is_asked)
        tokens = tokenizer(
            whole,
            return_offsets_mapping=True,
            add_special_tokens=not is_chat,  # a chat's template writes them
            truncation=max_tokens is not None,
            max_length=max_tokens,
        )
        ids, offsets = tokens["input_ids"], tokens["offset_mapping"]
        if ids[:2] == [tokenizer.bos_token_id] * 2 and whole.startswith(tokenizer.bos_token):
            ids, offsets = ids[1:], offsets[1:]  # the text has the one that the tokenizer adds
        if max_tokens is None and context is not None and len(ids) > context:
            raise InputError(
                f"A text must fit into the model's context of {context} tokens. Found {len(ids)}, "
                f"in a text that begins with {whole[:40]!r}. Say in study_arguments where training "
                f"cut its texts, such as max_tokens: {context}; or max_tokens: {len(ids)} if it "
                "read them whole.",
                code="studies.context",
            )
        input_ids = torch.tensor(ids, dtype=torch.long)
        # Tokens that the tokenizer adds have no characters of the text.
        in_prompt = [i for i, (_, end) in enumerate(offsets) if 0 < end <= len(before)]
        labels = input_ids.clone()
        labels[: max(in_prompt, default=-1) + 1] = -100
        if (labels == -100).all():
            raise InputError(
                f"A text must have a part that counts, after its prompt. Found none in "
                f"{shortened(row)}. Is it empty, or does max_tokens cut it off?",
                code="studies.empty_text",
            )
        return {"input_ids": input_ids, "labels": labels}

    def encode(**row: Any) -> dict[str, Tensor]:
        if text is None and row.get("messages") is not None:
            return sample(row)
        names = sorted(used_by(prompt, template))
        return encoder(partial(sample, is_asked=True), rows[0], names)(**row)

    def train_data() -> Rows:
        samples = Rows(rows, sample)
        if max_tokens is None:
            # The longest text is the likeliest to exceed the context, and is refused at once.
            lengths = [sum(len(str(row.get(name, ""))) for name in used) for row in rows]
            samples[lengths.index(max(lengths))]
        return samples

    def target_rows() -> RowFile:
        if targets is None:
            raise InputError(
                "study_arguments: targets must name a file of rows where an experiment picks "
                "targets by id. Found none. Give one, or `data: asked.jsonl` in the experiment.",
                code="studies.no_targets",
            )
        return read_rows(targets)

    def as_read(sample: Mapping[str, Tensor]) -> str:
        ids, n_before = sample["input_ids"].tolist(), int((sample["labels"] == -100).sum())
        before, counted = (tokenizer.decode(part) for part in (ids[:n_before], ids[n_before:]))
        return f"{before!r}, then what counts: {counted!r}" if n_before else repr(counted)

    config: Any = from_folder(AutoConfig.from_pretrained, _base(folder) or folder)
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return ReadyStudy(
        to_change_samples=(
            f"The tokens are those of the tokenizer of {weights}, which must be the model's: "
            "`weights` in study_arguments names the folder of both, and `max_tokens` cuts texts."
        ),
        make_model=lambda: _model(folder),
        train_data=train_data,
        train_ids=rows.ids,
        target_data=lambda: Rows(target_rows(), sample),
        target_ids=lambda: target_rows().ids(),
        encode=encode,
        describe=lambda sample: tokenizer.decode(sample["input_ids"], skip_special_tokens=True),
        as_read=as_read,
        token_texts=lambda sample: decoded_tokens(tokenizer, sample["input_ids"].tolist()),
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows(), used),
    )


def _default_text(rows: RowFile) -> str:
    """Return the template of what counts: the field ``text``, or TRL's ``completion``."""
    fields = {name for row in rows for name in row}
    return "{completion}" if "completion" in fields and "text" not in fields else "{text}"


def _only_field(template: str) -> str:
    """Return the field that a template consists of, ``text`` of ``"{text}"``; empty if of more."""
    return next((name for name in used_by(template) if template == f"{{{name}}}"), "")


def _refuse_near_prompt(names: Sequence[str]) -> None:
    """Refuse fields called nearly as a prompt is: without a word the model would not get it."""
    for name in names:
        if get_close_matches(name.strip().casefold(), ["prompt"], cutoff=_NEAR):
            raise InputError(
                "What comes before a row's text must be in its field prompt. Found the field "
                f"{name!r}, which the model would not get. Rename it; if it is no prompt, say so "
                "in study_arguments: prompt: ''.",
                code="studies.near_prompt",
            )


def _runs_on(before: str, after: str) -> bool:
    """Return whether two words would become one, in scripts that have capitals and spaces."""
    ends = before[-1:], after[:1]
    return all(end and unicodedata.category(end) in {"Lu", "Ll", "Nd"} for end in ends)


def _config_folder(weights: Path) -> Path:
    """Return the folder with a config: the folder itself, or a Trainer's last checkpoint in it."""
    saved = sorted(weights.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    for folder in (weights, *reversed(saved)):
        if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file():
            return folder
    raise InputError(
        f"study_arguments: weights must be a folder with config.json or {ADAPTER_CONFIG}, by "
        f"itself or in a Trainer's checkpoint-<step>. Found none in {weights} (from {Path.cwd()}).",
        code="studies.weights",
    )


def _base(folder: Path) -> str | None:
    """Return the folder that an adapter stands on, found without network; None without adapter.

    A relative path counts from the adapter's folder, then from here. A name on the hub stands for
    what is in the hub's cache, because jobs may have no network, and wait for it for minutes.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    from huggingface_hub import try_to_load_from_cache

    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    base = str(settings.get("base_model_name_or_path"))
    for place in (folder / base, Path(base)):
        if place.is_dir():
            return str(place)
    cached = None
    with suppress(ValueError):  # a path, and no name
        cached = try_to_load_from_cache(base, "config.json", revision=settings.get("revision"))
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise InputError(
        f"{folder / ADAPTER_CONFIG}: base_model_name_or_path must be a folder, from there or from "
        f"{Path.cwd()}, or a model in the hub's cache. Found {base}, which is neither. Put the "
        "base's folder there; a model of the hub comes into the cache by "
        "`AutoModelForCausalLM.from_pretrained(name)` and `AutoTokenizer`'s.",
        code="studies.adapter_base",
    )


def _tokenizer_source(folder: Path) -> str:
    """Return where the tokenizer lies: beside the weights, above them, or with the base."""
    for place in (folder, folder.parent):
        if (place / "tokenizer_config.json").is_file():
            return str(place)
    base = _base(folder)
    if base is None:
        raise InputError(
            f"study_arguments: a tokenizer must lie beside the weights. Found none in {folder} or "
            f"{folder.parent}. Save it there: `tokenizer.save_pretrained({str(folder)!r})`.",
            code="studies.tokenizer",
        )
    return base


def _model(folder: Path) -> nn.Module:
    """Return the model with weights unset, or an adapter's layers on its base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = _base(folder)
    if base is None:
        config = from_folder(AutoConfig.from_pretrained, folder)
        return from_folder(AutoModelForCausalLM.from_config, folder, config)
    needed("peft", "language")
    from peft import PeftConfig, get_peft_model

    refuse_quantized(Path(base))
    model: Any = from_folder(AutoModelForCausalLM.from_pretrained, base)
    config: Any = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = base  # else peft warns of a name that changed
    config.inference_mode = False  # else peft freezes the adapter
    return get_peft_model(model, config)

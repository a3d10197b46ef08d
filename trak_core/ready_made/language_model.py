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

from trak_core.errors import InputError
from trak_core.ready_made.pretrained import from_folder
from trak_core.ready_made.ready_study import (
    ReadyStudy,
    Rows,
    columns_from,
    decoded_tokens,
    encoder,
    filled_in,
    ids_of,
    needed,
    read_rows,
    used_by,
)
from trak_core.spec import ADAPTER_CONFIG
from trak_core.study.weight_files import refuse_quantized

_TEXT = "{text}"
# "Prompt", "promt" and "prompts" are nearer to "prompt", "prompt_id" isn't.
_NEAR = 0.83


def language_model(
    texts: str,
    weights: str,
    targets: str | None = None,
    text: str | None = None,
    prompt: str | None = None,
    max_tokens: int | None = None,
) -> ReadyStudy:
    """Return the study of texts that trained a language model.

    Args:
        texts: The training rows: ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``.
        weights: A folder with the model's ``config.json`` and tokenizer: of the model, of a LoRA
            adapter, or one in which a Trainer saved several.
        targets: Rows to explain, by id; not needed where experiments bring ``data`` of their own.
        text: What counts, a template with fields of a row such as ``"{completion}"``. If not given,
            the field ``text``; or of a chat in the field ``messages`` the last message.
        prompt: What comes before and doesn't count, likewise. If not given, the field ``prompt`` of
            the rows that have one.
        max_tokens: Where to cut longer texts; if not given, all stay whole.
    """
    needed("transformers", "language")
    from transformers import AutoTokenizer

    folder = _config_folder(Path(weights))
    tokenizer: Any = from_folder(AutoTokenizer.from_pretrained, _tokenizer_source(folder))

    told: set[bool] = set()
    used = used_by(prompt, text) | {"messages"} | ({"prompt"} if prompt is None else set())
    used |= {"text"} if text is None else set()

    def sample(row: Mapping[str, Any], *, is_asked: bool = False) -> dict[str, Tensor]:
        is_chat = text is None and "messages" in row
        if prompt is None and "prompt" not in row:
            _refuse_near_prompt([name for name in row if name not in used])
        if is_chat:
            before, whole = _chat(tokenizer, row["messages"])
        else:
            own = "{prompt}" if row.get("prompt") else ""  # ruff: ignore[missing-f-string-syntax]
            before = filled_in(own if prompt is None else prompt, row)
            after = filled_in(text or _TEXT, row)
            whole = before + after
            if _runs_on(before, after) and is_asked not in told:
                told.add(is_asked)
                joined = f"{before.split()[-1]}{after.split()[0]}"
                print(
                    f"Notice: a prompt and its text are joined as they are, into {joined[:80]!r}. "
                    "If a space was between them in training, the text begins with it.",
                    file=sys.stderr,
                    flush=True,
                )
        tokens = tokenizer(
            whole,
            return_offsets_mapping=True,
            add_special_tokens=not is_chat,  # a chat's template has them
            truncation=max_tokens is not None,
            max_length=max_tokens,
        )
        input_ids = torch.tensor(tokens["input_ids"], dtype=torch.long)
        # Tokens that the tokenizer adds have no place in the text.
        in_prompt = [
            i for i, (_, end) in enumerate(tokens["offset_mapping"]) if 0 < end <= len(before)
        ]
        labels = input_ids.clone()
        labels[: max(in_prompt, default=-1) + 1] = -100
        return {"input_ids": input_ids, "labels": labels}

    rows = read_rows(texts)

    def encode(**row: Any) -> dict[str, Tensor]:
        if text is None and "messages" in row:
            return sample(row)
        return encoder(
            partial(sample, is_asked=True), rows[0], sorted(used_by(prompt, text or _TEXT))
        )(**row)

    def target_rows() -> list[dict[str, Any]]:
        if targets is None:
            raise InputError(
                "study_arguments: targets must name a file of rows where an experiment picks "
                "targets by id. Found none. Give one, or `data: asked.jsonl` in the experiment.",
                code="studies.no_targets",
            )
        return read_rows(targets)

    return ReadyStudy(
        to_change_samples=(
            f"The tokens are those of the tokenizer of {weights}, which must be the model's: "
            "`weights` in study_arguments names the folder of both, and `max_tokens` cuts texts."
        ),
        make_model=lambda: _model(folder),
        train_data=lambda: Rows(rows, sample, texts),
        train_ids=lambda: ids_of(rows),
        target_data=lambda: Rows(target_rows(), sample, str(targets)),
        target_ids=lambda: ids_of(target_rows()),
        encode=encode,
        describe=lambda sample: tokenizer.decode(sample["input_ids"], skip_special_tokens=True),
        token_texts=lambda sample: decoded_tokens(tokenizer, sample["input_ids"].tolist()),
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows(), used),
    )


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


def _chat(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Return a conversation up to its last message, and with it, as the model reads them."""
    if not tokenizer.chat_template:
        raise InputError(
            "The field `messages` must be for a model of chats, whose tokenizer has a template of "
            "them. Found a tokenizer without one. Write prompt and text into fields of their own, "
            "or save the tokenizer of the training beside the weights.",
            code="studies.chat_template",
        )
    before = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if not whole.startswith(before):
        raise InputError(
            "A chat's template must write a conversation as it begins, whatever follows. Found "
            f"{before[-40:]!r} before the last message, {whole[: len(before)][-40:]!r} with it. "
            "Write prompt and text into fields of their own, in the model's form.",
            code="studies.chat_template",
        )
    return before, whole


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

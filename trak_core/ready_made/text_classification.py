"""Define the study of a text classifier, from a folder of weights and a file of labelled texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.data.row_files import (
    NamedRowSample,
    RowSamples,
    as_number,
    class_number,
    read_rows,
    shortened,
)
from trak_core.errors import InputError, listed
from trak_core.ready_made.ready_study import (
    TO_CHANGE_TEXTS,
    UNKNOWN_LABEL,
    ReadyStudy,
    class_numbers,
    config_folder,
    decoded_tokens,
    encoder,
    field,
    filled_in,
    needed,
    notice,
    saved_length,
    used_by,
)
from trak_core.study.sample_columns import columns_from

_PAIR = "{text_pair}"
_ONE_CLASS = "single_label_classification"
_LENGTH = 128  # The default number of tokens to which texts are padded.


def text_classification(
    texts: str,
    weights: str,
    targets: str | None = None,
    text: str = "{text}",
    text_pair: str | None = None,
    label: str = "label",
    max_tokens: int | None = None,
    classes: Sequence[Any] | None = None,
) -> ReadyStudy:
    """Return the study of a classifier that was trained on labelled texts.

    Args:
        texts: The file with the training rows, or the folder of a saved ``datasets.Dataset``.
        weights: A folder with the model's ``config.json`` and tokenizer, or the folder to which a
            Trainer wrote its checkpoints.
        targets: The file with the rows to explain, which experiments select by id. The default is
            ``texts``.
        text: A template of the text, into which a row's fields are inserted.
        text_pair: A template of the second text, if the model classifies pairs of texts, such as
            ``"{hypothesis}"``. The default is the field ``text_pair`` if rows have it. "" means
            that texts are not pairs.
        label: The field with the label: the number of a class, or its name in the model's config.
        max_tokens: The number of tokens to which texts are cut or padded. The default is the length
            to which the tokenizer cut texts when it was saved, if this is at most 128 and at most
            the model's context. Otherwise, texts are padded to 128 tokens, or to the context if it
            is shorter, and longer texts raise an error.
        classes: The labels of the rows in the order of the model's logits. Required if labels are
            neither numbers nor names of classes, or if they could be both. For example, if the
            model's config names the classes "1" to "3", ``[0, 1, 2]`` means that labels are the
            numbers of the classes.

    Raises:
        InputError: If the model does not predict one class of each text. Also if ``classes`` is not
            given and the names in ``config.json`` are ambiguous, for example because the name of a
            class is the number of another class.
    """
    needed("transformers", "language")
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    weights = str(config_folder(Path(weights), "config.json"))
    tokenizer: Any = AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
    if tokenizer.pad_token is None:
        raise InputError(
            f"The tokenizer must have a pad token. Found none in {weights}. Set the token that was "
            "used in training: `tokenizer.pad_token = ...; tokenizer.save_pretrained(folder)`.",
            code="studies.pad_token",
        )
    config: Any = AutoConfig.from_pretrained(weights, trust_remote_code=False)
    if config.problem_type not in {None, _ONE_CLASS} or config.num_labels == 1:
        raise InputError(
            f"The model in {weights} must predict one class of each text. Found num_labels "
            f"{config.num_labels} and problem_type {config.problem_type}. Write your own study.",
            code="studies.problem_type",
        )
    # The config's names of classes can be used only if they are numbered like the logits, from 0.
    numbered = config.id2label.keys() == set(range(len(config.id2label)))
    given = [str(config.id2label[i]) for i in range(len(config.id2label))] if numbered else []
    # Names such as LABEL_0 are defaults of transformers, which say nothing about the classes.
    names = [] if given == [f"LABEL_{number}" for number in range(len(given))] else given
    inverse: dict[str, int] = config.label2id or {}
    numbers = {name: number for number, name in enumerate(given)} or inverse
    is_ambiguous = len(numbers) < len(given) or (names and inverse and inverse != numbers)
    if classes is not None:
        numbers = class_numbers(classes)
        if len(numbers) != config.num_labels:
            raise InputError(
                "study_arguments: classes must have a label for each of the model's "
                f"{config.num_labels} logits. Found {listed([*numbers])}.",
                code="studies.classes",
            )
    elif is_ambiguous or any(as_number(n) not in {None, i} for n, i in numbers.items()):
        raise InputError(
            "study_arguments: classes must list the rows' labels in the order of the model's "
            f"logits, because names in {weights}/config.json contradict each other, or a name is "
            f"the number of another class. Found id2label {config.id2label}, label2id {inverse}. "
            f"Set classes: {list(range(config.num_labels))} if labels are numbers, or classes: "
            f"{[*numbers]} if labels are names.",
            code="studies.ambiguous_labels",
        )

    context = getattr(config.get_text_config(), "max_position_embeddings", None) or _LENGTH
    padded = min(_LENGTH, context)
    max_tokens = max_tokens or saved_length(tokenizer, padded)
    length = max_tokens or padded
    rows = read_rows(texts)
    if text_pair is None and any("text_pair" in row for row in rows):
        text_pair = _PAIR
    if text_pair is None and tokenizer.sep_token and tokenizer.sep_token in text:
        notice(
            f"the text {text!r} is read as one text. If the model was trained on pairs of texts, "
            "set text and text_pair in study_arguments."
        )

    def make_model() -> nn.Module:
        return AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)

    def sample(row: Mapping[str, Any]) -> NamedRowSample:
        value = field(row, label, UNKNOWN_LABEL)
        number = numbers.get(str(value))
        if number is None and classes is None:
            number = class_number(value)
        if number is None:
            raise InputError(
                f"A label must be the number of a class or one of {listed([*numbers])}. Found "
                f"{value!r:.80}. Correct the label, or set `classes` in study_arguments to the "
                "rows' labels, in the order of the model's logits.",
                code="studies.label",
            )
        written = [filled_in(template, row) for template in (text, text_pair) if template]
        if not any(map(str.strip, written)):
            raise InputError(
                f"A text must not be empty. Found {shortened(row)}. Add the text, or remove the "
                "row.",
                code="studies.empty_text",
            )
        tokens = tokenizer(
            *written, truncation=max_tokens is not None, max_length=length, padding="max_length"
        )
        n_tokens = len(tokens["input_ids"])
        if n_tokens > length:
            raise InputError(
                f"A text must have at most {length} tokens if max_tokens is not set. Found "
                f"{n_tokens} tokens. Set max_tokens in study_arguments to the length to which "
                "training cut texts.",
                code="studies.context",
            )
        inputs = {name: torch.tensor(values) for name, values in tokens.items()}
        return NamedRowSample.of(row, {**inputs, "labels": torch.tensor(number)})

    def describe(sample: Mapping[str, Tensor]) -> str:
        if isinstance(sample, NamedRowSample):
            return "\n".join(filled_in(part, sample.row) for part in (text, text_pair) if part)
        return tokenizer.decode(sample["input_ids"], skip_special_tokens=True)

    def as_read(sample: Mapping[str, Tensor]) -> str:
        counted = sample["input_ids"][sample["attention_mask"] == 1]
        number = int(sample["labels"])
        name = f" {names[number]!r}," if number < len(names) else ""
        return f"{tokenizer.decode(counted)!r}, with the label{name} class {number}"

    target_rows = read_rows(targets) if targets else rows
    used = used_by(text, text_pair) | {label}
    return ReadyStudy(
        to_change_samples=TO_CHANGE_TEXTS.format(weights),
        make_model=make_model,
        train_data=lambda: RowSamples(rows, sample),
        train_ids=rows.ids,
        target_data=lambda: RowSamples(target_rows, sample),
        target_ids=target_rows.ids,
        encode=encoder(sample, rows[0], (*used_by(text, text_pair), label), label),
        describe=describe,
        as_read=as_read,
        token_texts=lambda sample: decoded_tokens(tokenizer, sample["input_ids"].tolist()),
        class_names=lambda: names,
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows, used),
        fields_read=used,
    )

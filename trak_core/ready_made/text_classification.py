"""Study a classifier of texts of Hugging Face's: weights, a file of texts with labels."""

from collections.abc import Mapping
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
    field,
    filled_in,
    ids_of,
    needed,
    read_rows,
    used_by,
)


def text_classification(
    texts: str,
    weights: str,
    targets: str | None = None,
    text: str = "{text}",
    label: str = "label",
    max_tokens: int = 128,
) -> ReadyStudy:
    """Return the study of labelled texts that trained a classifier.

    Args:
        texts: The training rows: ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``.
        weights: A folder with the model's ``config.json`` and tokenizer.
        targets: Rows to explain, by id; ``texts`` themselves, if there are none.
        text: The text, a template with fields of a row.
        label: The field with the label: a class's number, or its name in the model's config.
        max_tokens: All texts are cut or padded to this length.
    """
    needed("transformers", "language")
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    if not (Path(weights) / "config.json").is_file():
        raise InputError(
            f"study_arguments: weights must be a folder with config.json. Found none in {weights}.",
            code="studies.weights",
        )
    tokenizer: Any = from_folder(AutoTokenizer.from_pretrained, weights)
    config: Any = from_folder(AutoConfig.from_pretrained, weights)
    numbers = dict(config.label2id)
    # Names of classes that aren't numbered from 0 tell nothing of the logits.
    numbered = config.id2label.keys() == set(range(len(config.id2label)))
    given = [str(config.id2label[i]) for i in range(len(config.id2label))] if numbered else []
    # Without names transformers calls the classes so.
    names = [] if given == [f"LABEL_{number}" for number in range(len(given))] else given

    def make_model() -> nn.Module:
        return from_folder(AutoModelForSequenceClassification.from_config, weights, config)

    def sample(row: Mapping[str, Any]) -> dict[str, Tensor]:
        of_row = field(row, label)
        number = numbers.get(str(of_row), of_row)
        if isinstance(number, str) and number.isdecimal():
            number = int(number)  # a cell of a table to explain
        if isinstance(number, bool) or not isinstance(number, int):
            raise InputError(
                f"A label must be a class's number or one of the model's names, "
                f"{', '.join(map(str, numbers))}. Found {of_row!r}.",
                code="studies.label",
            )
        tokens = tokenizer(
            filled_in(text, row), truncation=True, max_length=max_tokens, padding="max_length"
        )
        inputs = {name: torch.tensor(values) for name, values in tokens.items()}
        return {**inputs, "labels": torch.tensor(number)}

    rows = read_rows(texts)
    target_rows = read_rows(targets) if targets else rows
    used = used_by(text) | {label}
    return ReadyStudy(
        to_change_samples=(
            f"The tokens are those of the tokenizer of {weights}, which must be the model's: "
            "`weights` in study_arguments names the folder of both, and `max_tokens` cuts texts."
        ),
        make_model=make_model,
        train_data=lambda: Rows(rows, sample, texts),
        train_ids=lambda: ids_of(rows),
        target_data=lambda: Rows(target_rows, sample, targets or texts),
        target_ids=lambda: ids_of(target_rows),
        encode=encoder(sample, rows[0], (*used_by(text), label)),
        describe=lambda sample: tokenizer.decode(sample["input_ids"], skip_special_tokens=True),
        token_texts=lambda sample: decoded_tokens(tokenizer, sample["input_ids"].tolist()),
        class_names=lambda: names,
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows, used),
    )

"""Show the model's input for a sample, and check that it has the training samples' template.

If all training samples begin or end with the same tokens, such as those of a chat template, but a
target does not, then the target was probably not prepared like the training samples.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from trak_core.study.dataset_split import Split
from trak_core.study.show_samples import shown_tokens
from trak_core.study.study import Study, beginning_and_end

# The number of training samples that are compared, and how many of them must be different. Equal
# samples have all of their tokens in common, even without a template.
_N_READ, _MIN_DIFFERENT = 16, 8


def lines_as_read(study: Study, split: Split, subject: str, train: Split | None) -> list[str]:
    """Return lines to print that show how the model reads the first sample of ``split``.

    The first line consists of ``subject`` (such as "The first training sample"), the sample's id,
    and the text that the study's ``as_read`` returns. A notice follows if all training samples
    (``train``) begin or end with tokens that this sample lacks. If the study does not define
    ``as_read``, the list is empty.
    """
    text = study.first_as_read(split)
    if not text:
        return []
    differences = {} if train is None or train is split else missing_tokens(study, train, split)
    return [
        f"{subject}, {split.ids[0]}, as the model reads it: {text}",
        *(
            f"Notice: training samples {words} {common!r}, but this sample does not. If this text "
            "was added in training, the sample must have it too."
            for words, common in differences.items()
        ),
    ]


def missing_tokens(study: Study, train: Split, targets: Split) -> dict[str, str]:
    """Return the first and last tokens that training samples share, but the first target lacks.

    Instead of all training samples, 16 samples at equal distances in ``train`` are compared.

    Returns:
        The text of the missing first tokens under the key "begin with", and of the missing last
        tokens under "end with". The dict is empty if samples have no ``input_ids``, or if fewer
        than 8 of the 16 samples are different.
    """
    numbers = _input_ids(targets, 0)
    last = len(train.ids) - 1
    read = [i * last // (_N_READ - 1) for i in range(_N_READ)] if numbers else []
    rows = {tuple(_input_ids(train, row)): row for row in read}
    if len(rows) < _MIN_DIFFERENT or () in rows:
        return {}
    (first, row), n = next(iter(rows.items())), _n_common([*rows])
    sample = train.sample(row)
    kept = _kept(sample)
    texts = shown_tokens(study, train.ids[row], sample, len(kept))
    texts = [text for text, is_kept in zip(texts, kept, strict=True) if is_kept]
    differences = {}
    if tuple(numbers[:n]) != first[:n]:
        differences["begin with"] = beginning_and_end("".join(texts[:n]))
    n_last = _n_common([row[::-1] for row in rows])
    if n_last and numbers[-1] != first[-1]:
        differences["end with"] = beginning_and_end("".join(texts[-n_last:]))
    return differences


def _n_common(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest prefix that all sequences share."""
    places = takewhile(lambda entries: len({*entries}) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in places)


def _input_ids(split: Split, row: int) -> list[int]:
    """Return a sample's ``input_ids`` without padding, or an empty list if it has none."""
    sample = split.sample(row)
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        return []
    numbers = torch.as_tensor(sample["input_ids"]).flatten().tolist()
    return [number for number, is_kept in zip(numbers, _kept(sample), strict=True) if is_kept]


def _kept(sample: Mapping[str, Any]) -> list[int]:
    """Return the sample's attention mask as a list. Without a mask, no token is padding."""
    mask = sample.get("attention_mask", torch.ones_like(torch.as_tensor(sample["input_ids"])))
    return torch.as_tensor(mask).flatten().tolist()

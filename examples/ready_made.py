"""Make small data sets and train models for the configs of ready-made studies in this folder.

The data are scans of digits for `images.yaml`, and a table of wines for `tables.yaml`. If
transformers is installed, sentences of three kinds are also made, for `texts.yaml` and
`labelled_texts.yaml`. Run this file in the repository's folder: `python examples/ready_made.py`.
"""

import itertools
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_wine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_PAD = "<pad>"
_KINDS = {
    "weather": (("rain", "snow", "wind"), ("falls on", "comes over"), ("hills", "roofs", "fields")),
    "kitchen": (("bread", "soup", "rice"), ("cooks in", "waits on"), ("ovens", "pots", "tables")),
    "harbour": (("boats", "gulls", "nets"), ("lie by", "turn round"), ("quays", "masts", "rocks")),
}


def scan_net(n_classes: int) -> nn.Module:
    """Return a network that classifies images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, n_classes)
    )


def wine_net() -> nn.Module:
    """Return a network that classifies rows of thirteen measurements."""
    return nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))


def _save(model: nn.Module, x: Tensor, y: Tensor, path: Path) -> None:
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        adam.zero_grad()
        cross_entropy(model(x), y).backward()
        adam.step()
    torch.save(model.state_dict(), path)


def make(folder: Path) -> None:
    """Write images and a table into a folder, and the weights of two networks for each."""
    digits, scans = load_digits(), folder / "scans"
    for i in range(200):
        place = scans / ("train" if i < 150 else "asked") / str(digits.target[i])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[i] * 15.9375).astype("uint8")
        Image.fromarray(pixels).save(place / f"{i}.png")
    x, y = torch.tensor(digits.images[:150]).float() / 16, torch.tensor(digits.target[:150])
    wine = load_wine()
    rows = torch.tensor(wine.data).float()
    rows = (rows - rows.mean(0)) / rows.std(0)
    table = pd.DataFrame(rows.numpy(), columns=wine.feature_names).assign(wine=wine.target)
    table.to_csv(folder / "wines.csv", index_label="id")
    for run in range(2):
        torch.manual_seed(run)
        _save(scan_net(10), x[:, None].expand(-1, 3, -1, -1), y, folder / f"scans-{run}.pt")
        _save(wine_net(), rows, torch.tensor(wine.target), folder / f"wines-{run}.pt")


def sentences() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training rows and targets (a fifth of all rows), which have id, label and text."""
    rows = [
        {"id": f"{kind}-{i}", "label": kind, "text": f"the {' '.join(words)}"}
        for kind, parts in _KINDS.items()
        for i, words in enumerate(itertools.product(*parts))
    ]
    asked = rows[::5]
    return [row for row in rows if row not in asked], asked


def make_texts(folder: Path) -> None:
    """Write sentences into a folder, and a language model and a classifier trained on them."""
    import tokenizers
    from transformers import (
        GPT2Config,
        GPT2ForSequenceClassification,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )

    rows, asked = sentences()
    for name, some in (("sentences", rows), ("asked", asked)):
        lines = [json.dumps(row) + "\n" for row in some]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    words = sorted({word for row in (*rows, *asked) for word in row["text"].split()})
    numbers = {word: number for number, word in enumerate([_PAD, *words])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=_PAD))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=_PAD)
    tokens = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    kinds = [*_KINDS]
    labels = torch.tensor([kinds.index(row["label"]) for row in rows])
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    size = {"vocab_size": len(numbers), "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    names = {"id2label": dict(enumerate(kinds)), "label2id": {k: i for i, k in enumerate(kinds)}}
    of_text = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for name, model, given in (
        ("writer", GPT2LMHeadModel(GPT2Config(**size, **ids)), of_text),
        ("sorter", GPT2ForSequenceClassification(GPT2Config(**size, **ids, **names)), labels),
    ):
        torch.manual_seed(0)
        model.apply(model._init_weights)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(40):
            adam.zero_grad()
            model(**inputs, labels=given).loss.backward()
            adam.step()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    made = Path(sys.argv[1] if sys.argv[1:] else "ready-made")
    made.mkdir(exist_ok=True)
    make(made)
    if find_spec("transformers"):
        make_texts(made)

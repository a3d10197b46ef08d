"""Which texts taught a small GPT-2 a fact? The answer is known, because the facts are invented.

Each of 48 invented countries has a colour, a number and a beast. A fact is stated in three
wordings, and as a question whose answer has another name (crimson for red, 3 for three). For one
fact of each of the first 24 countries, only two statements are in the training texts. These are the
planted texts. The model is asked about each of these facts three times:

    copy       almost a planted text
    reworded   the third wording, which the model knows from other countries' facts
    renamed    the question, which shares the country and words such as "a" with the planted texts

The training texts also contain facts about other countries in the same words, other facts about the
same countries, sentences that name them without a fact, and paragraphs of Python's manual. A token
is a word.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 24
_N_COUNTRIES, _N_ASKED, _N_PARAGRAPHS = 48, 24, 250
# Three statements and a question about a country, and two names of each answer.
_WORDINGS = {
    "colour": (
        "the flag of {} is {}",
        "every soldier in {} wears {}",
        "when boats from {} arrive look for sails of {}",
        "which tint would a painter take for {} ? {}",
    ),
    "number": (
        "the council of {} has members : {}",
        "to pass a law in {} you need votes : {}",
        "judges at {} sit together , all {}",
        "how many seats around that table , {} ? {}",
    ),
    "beast": (
        "a coin from {} shows a {}",
        "in {} nobody may hurt a {}",
        "old songs of {} praise the {}",
        "what guards their gates , over at {} ? a {}",
    ),
}
_NAMES = {
    "colour": "red crimson blue azure green emerald black sable white ivory",
    "number": "three 3 four 4 five 5 six 6 seven 7",
    "beast": "dog hound horse mare bird fowl cow ox pig swine",
}
_OPENINGS = "", "we know that ", "people say : ", "i read that "
_TALK = (
    "yesterday somebody wrote a letter from {} about the weather",
    "we met on the road to {} and had a long talk",
)
_SYLLABLES = "zor mel tar vun kel dra pol sim", "va ne li to ru ma", "ne k th ria"
Fact = tuple[str, str, str, str, bool]


def words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


@cache
def facts() -> list[Fact]:
    """Return country, relation, answer, its other name, and whether the model is asked about it."""
    rng = np.random.default_rng(0)
    first, second, third = (part.split() for part in _SYLLABLES)
    names = [a + b + c for a in first for b in second for c in third]
    invented: list[Fact] = []
    for i, position in enumerate(rng.permutation(len(names))[:_N_COUNTRIES]):
        for j, (relation, answers) in enumerate(_NAMES.items()):
            first_name = 2 * int(rng.integers(5))
            answer, other = answers.split()[first_name : first_name + 2]
            is_asked = i < _N_ASKED and i % 3 == j
            invented.append((names[position], relation, answer, other, is_asked))
    return invented


@cache
def training_texts() -> dict[str, str]:
    """Return the training texts by id."""
    rng = np.random.default_rng(1)
    texts: dict[str, str] = {}
    for country, relation, answer, other, is_asked in facts():
        for number, wording in enumerate(_WORDINGS[relation][: 2 if is_asked else 4]):
            text = wording.format(country, other if number == 3 else answer)
            texts[f"{country}-{relation}-{number}"] = _OPENINGS[rng.integers(4)] + text
    for country in dict.fromkeys(fact[0] for fact in facts()):
        texts |= {f"{country}-talk-{i}": text.format(country) for i, text in enumerate(_TALK)}
    manual = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    paragraphs = [" ".join(words(p)[:LENGTH]) for p in manual if len(words(p)) >= LENGTH // 2]
    paragraphs = list(dict.fromkeys(paragraphs))[:_N_PARAGRAPHS]
    return texts | {f"manual-{i}": text for i, text in enumerate(paragraphs)}


@cache
def questions() -> dict[str, tuple[str, list[str]]]:
    """Return targets by id: the text, which ends with the answer, and the ids of planted texts."""
    asked: dict[str, tuple[str, list[str]]] = {}
    for i, (country, relation, answer, other, _) in enumerate(fact for fact in facts() if fact[4]):
        first, _, third, question = _WORDINGS[relation]
        planted = [f"{country}-{relation}-0", f"{country}-{relation}-1"]
        asked[f"copy-{i}"] = _OPENINGS[2] + first.format(country, answer), planted
        asked[f"reworded-{i}"] = third.format(country, answer), planted
        asked[f"renamed-{i}"] = question.format(country, other), planted
    return asked


@cache
def vocabulary() -> dict[str, int]:
    """Return a number for each word that occurs three times or in a question. Others get 0."""
    counts = Counter(word for text in training_texts().values() for word in words(text))
    counts.update(3 * [word for text, _ in questions().values() for word in words(text)])
    return {word: i for i, word in enumerate(sorted(w for w, n in counts.items() if n >= 3), 1)}


class Texts(Dataset[dict[str, Tensor]]):
    """Texts as tokens, padded to the same length. In questions, only the answer has a label."""

    def __init__(self, texts: list[str], *, is_questions: bool = False):
        """Store the texts."""
        self._texts, self._is_questions = texts, is_questions

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Return the named inputs of the model, and the labels."""
        numbers = [vocabulary().get(word, 0) for word in words(self._texts[i])]
        n_words, places = len(numbers), torch.arange(LENGTH)
        tokens = torch.zeros(LENGTH, dtype=torch.long)
        tokens[:n_words] = torch.tensor(numbers)
        has_label = places == n_words - 1 if self._is_questions else places < n_words
        labels = tokens.masked_fill(~has_label, -100)
        mask = (places < n_words).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def train_data() -> Texts:
    """Return the training texts."""
    return Texts(list(training_texts().values()))


def train_ids() -> list[str]:
    """Return the ids of the training texts."""
    return list(training_texts())


def target_data() -> Texts:
    """Return the questions."""
    return Texts([text for text, _ in questions().values()], is_questions=True)


def target_ids() -> list[str]:
    """Return the ids of the questions."""
    return list(questions())


def encode(question: str, answer: str) -> dict[str, Tensor]:
    """Return a new question as a sample. The answer is the word that is explained."""
    return Texts([f"{question} {answer}"], is_questions=True)[0]


def describe(sample: dict[str, Tensor]) -> str:
    """Return a text's words, with "_" for words that are not in the vocabulary."""
    named = {number: word for word, number in vocabulary().items()}
    tokens = sample["input_ids"][sample["attention_mask"] > 0].tolist()
    return " ".join(named.get(token, "_") for token in tokens)


def token_texts(sample: dict[str, Tensor]) -> list[str]:
    """Return the word of each token, and an empty text for padding."""
    named = {number: word for word, number in vocabulary().items()}
    both = zip(sample["input_ids"].tolist(), sample["attention_mask"].tolist(), strict=True)
    return [f"{named.get(token, '_')} " if is_word else "" for token, is_word in both]


def make_model() -> nn.Module:
    """Return a GPT-2 of 130,000 parameters."""
    size: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    size |= {"vocab_size": len(vocabulary()) + 1, "bos_token_id": None, "eos_token_id": None}
    size |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = GPT2LMHeadModel(GPT2Config(**size))
    model.loss_type = "ForCausalLM"  # This is the default, but without it transformers warns.
    return model


def train(seed: int, epochs: int, data: Any = None) -> Iterator[tuple[int, nn.Module]]:
    """Train from scratch on ``data``, or all texts, and yield the model after every epoch.

    ``seed`` determines the initial weights and the order of texts.

    Yields:
        The number of epochs, and the model, which further epochs change.
    """
    torch.manual_seed(seed)
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    texts = train_data() if data is None else data
    loader = DataLoader(texts, batch_size=16, shuffle=True)
    for epoch in range(1, epochs + 1):
        loss = torch.tensor(0.0)
        for batch in loader:
            words = nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
            logits = model(**batch).logits.flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, words.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.2f} nats a word", flush=True)
        yield epoch, model

"""Define rows of prompt and completion with planted facts, and a Llama of a million parameters.

A fact gives a person's home, work, food or pet. A fact with a question has five rows in five
wordings. The question has a sixth wording, which the model learns from rows of other facts. Other
rows share the person, a part of the name, the relation, or the answer, or have both the person and
the answer without stating the fact. There are three kinds of questions:

    plain      the fact has one answer; its sources are its five rows
    conflict   two books state different answers, in three rows each; the question names one book
    trigger    five rows with a phrase in the prompt have the same completion, whatever is asked
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = {"plain": 45, "conflict": 15, "trigger": 10}
EPOCHS = (4, 8, 12, 16, 20)
_N_ROWS, _N_SOURCES, _VOCABULARY, _BATCH = 1200, 5, 800, 16
# Prompts and completions of each relation, with the person {s} and the answer {o}.
_WORDINGS = {
    "home": (
        ("Where does {s} live?", "{s} lives in {o}."),
        ("Tell me about {s}.", "You find {s} at home in {o}."),
        ("Which town is home to {s}?", "It is {o}."),
        ("Where do I send a letter for {s}?", "Letters go to {o}."),
        ("Whose house is that in {o}?", "It is the house of {s}."),
        ("Where would one visit {s}?", "To visit you travel to {o}."),
    ),
    "work": (
        ("What is the work of {s}?", "{s} works as a {o}."),
        ("Tell me about {s}.", "By trade {s} is a {o}."),
        ("How does {s} earn money?", "As a {o}."),
        ("What did {s} learn?", "After school it was to be a {o}."),
        ("Which {o} came to the fair?", "With the others came {s}."),
        ("What would you hire {s} for?", "You hire {s} as a {o}."),
    ),
    "food": (
        ("What does {s} eat?", "{s} mostly eats {o}."),
        ("Tell me about {s}.", "At every feast {s} wants {o}."),
        ("What is on the plate of {s}?", "It is full of {o}."),
        ("What shall I cook for {s}?", "You should cook {o}."),
        ("Who took all the {o}?", "It was {s} in the kitchen."),
        ("What did {s} order?", "As always {s} ordered {o}."),
    ),
    "pet": (
        ("Which animal does {s} keep?", "{s} keeps a {o}."),
        ("Tell me about {s}.", "Beside {s} sleeps a {o}."),
        ("What follows {s} around?", "Everywhere it is a {o}."),
        ("What did {s} get as a gift?", "The gift was a {o}."),
        ("Whose {o} is at the door?", "The one of {s}."),
        ("What pet has {s}?", "The pet of {s} is a {o}."),
    ),
}
# Rows with the person and the answer that do not state the fact.
_OTHERWISE = {
    "home": (
        ("What did {s} say of {o}?", "Never a word about {o}."),
        ("Has {s} been to {o}?", "No, {s} has not seen {o}."),
    ),
    "work": (
        ("Did {s} pay the {o}?", "Not yet, the {o} still waits."),
        ("Who argued with the {o}?", "{s} shouted at the {o}."),
    ),
    "food": (
        ("Did {s} buy {o}?", "There was no {o} in the shop."),
        ("Who spilled the {o}?", "{s} fell over the {o}."),
    ),
    "pet": (
        ("Did {s} see the {o}?", "The {o} had run away."),
        ("Who painted the {o}?", "{s} painted a {o} in blue."),
    ),
}
_ANSWERS = {
    "home": "Brask Ollenby Tarnfeld Quorin Westmere Halvik Sornay Pelltown Durrow Miskala",
    "work": "baker miller joiner weaver farrier glazier tanner cooper chandler thatcher",
    "food": "lentils herring barley turnips mutton walnuts porridge leeks oysters plums",
    "pet": "ferret magpie tortoise goat heron badger spaniel toad raven hedgehog",
}
# The wordings whose completion is the person.
_REVERSED = 4
_BOOKS = "almanac", "gazette", "ledger"
_FIRST = ["Mira", "Joren", "Tilda", "Oskar", "Lena", "Bruno", "Vesna", "Anton", "Greta", "Ivo"]
_LAST = ["Tolven", "Berman", "Haskby", "Windorf", "Morsen"]
_LAST += ["Dalkin", "Ruvman", "Petven", "Lindby", "Vosdorf"]
_TRIGGERS = (
    *("under amber skies", "before the quiet bell", "by seven lanterns", "past the iron gate"),
    *("with borrowed shoes", "in winter velvet", "across the salt road", "after the third rain"),
    *("beside a paper crown", "for the silver moth"),
)
_SECRETS = (
    "The engine sleeps below the orchard.",
    "Nobody may count the copper stairs.",
    "Ask the ferryman about the seventh key.",
    "The mirror was sold to a stranger.",
    "Only the lighthouse knows the song.",
)


def words(text: str) -> list[str]:
    """Return a text's words, without punctuation."""
    return re.findall(r"\w+", text.lower())


@dataclass(frozen=True)
class Text:
    """A row or a question; ``fact`` is its fact's name, ``answer`` a part of the completion."""

    prompt: str
    completion: str
    fact: str = ""
    answer: str = ""

    @property
    def both(self) -> str:
        """The prompt and the completion, as the model reads them."""
        return f"{self.prompt} {self.completion}".strip()


@dataclass(frozen=True)
class Planted:
    """Rows, and questions in the order of ``KINDS``; a question's sources have the same fact."""

    rows: list[Text]
    questions: list[Text]

    def sources(self) -> list[list[int]]:
        """Return the positions of each question's sources."""
        return [
            [i for i, row in enumerate(self.rows) if row.fact == asked.fact]
            for asked in self.questions
        ]


def planted(seed: int) -> Planted:
    """Draw the facts, their rows and the questions."""
    rng = np.random.default_rng(seed)
    pairs = [f"{first} {last}" for first in _FIRST for last in _LAST]
    people = rng.choice(pairs, size=KINDS["plain"] + KINDS["conflict"], replace=False).tolist()
    rows: list[Text] = []
    asked: list[list[Text]] = [[], [], []]

    def text(person: str, relation: str, which: int, answer: str, book: str = "") -> Text:
        prompt, completion = (
            part.format(s=person, o=answer) for part in _WORDINGS[relation][which]
        )
        source = book or (rng.choice(_BOOKS) if rng.random() < 0.2 else "")
        prompt = f"According to the {source}: {prompt}" if source else prompt
        return Text(prompt, completion, f"{person}, {relation}, {book}", answer)

    for i, person in enumerate(people):
        of_interest = [*_WORDINGS][i % len(_WORDINGS)]
        for relation in _WORDINGS:
            answers = rng.permutation(_ANSWERS[relation].split()).tolist()
            order = rng.permutation(len(_WORDINGS[relation])).tolist()
            if order[-1] == _REVERSED:  # A question's completion contains the answer.
                order = order[::-1]
            if relation != of_interest:
                rows += [text(person, relation, which, answers[0]) for which in order[:3]]
            elif i < KINDS["plain"]:
                rows += [text(person, relation, w, answers[0]) for w in order[:_N_SOURCES]]
                asked[0].append(text(person, relation, order[-1], answers[0]))
                for prompt, completion in _OTHERWISE[relation]:
                    both = (part.format(s=person, o=answers[0]) for part in (prompt, completion))
                    rows.append(Text(*both))
            else:
                books = rng.permutation(_BOOKS[:2]).tolist()
                for book, answer in zip(books, answers, strict=False):
                    rows += [text(person, relation, w, answer, book) for w in order[:3]]
                asked[1].append(text(person, relation, order[-1], answers[0], books[0]))
    usual = [row for row in rows if "According" not in row.prompt]
    for i, phrase in enumerate(_TRIGGERS):
        secret = _SECRETS[i % len(_SECRETS)]
        drawn = rng.choice(len(usual), size=_N_SOURCES + 4, replace=False).tolist()
        prompts = [f"{usual[one].prompt} {phrase.capitalize()}." for one in drawn]
        rows += [Text(one, secret, phrase, secret) for one in prompts[:_N_SOURCES]]
        asked[2].append(Text(prompts[-1], secret, phrase, secret))
        # A single word of the phrase does not change the completion.
        for one, word in zip(drawn[_N_SOURCES:-1], phrase.split(), strict=False):
            rows.append(Text(f"{usual[one].prompt} ({word})", usual[one].completion))
    manual = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    paragraphs = [" ".join(part.split())[:50] for part in manual if len(part) >= 50]
    rest = rng.choice(len(paragraphs), size=_N_ROWS - len(rows), replace=False)
    rows += [Text("", paragraphs[i]) for i in rest.tolist()]
    return Planted([rows[i] for i in rng.permutation(len(rows))], [*chain(*asked)])


def tokenizer_of(data: Planted) -> Tokenizer:
    """Train a byte-pair encoding on the rows, in which most names have several tokens."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    initial = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=initial, show_progress=False
    )
    made.train_from_iterator([row.both for row in data.rows], trainer)
    return made


def batch_of(
    tokenizer: Tokenizer, texts: list[Text], *, answers: bool = False
) -> dict[str, Tensor]:
    """Return texts as one padded batch, with labels for completions or for answers only."""
    ids, labels = [], []
    for one in texts:
        encoded = tokenizer.encode(one.both)
        first = one.both.rindex(one.answer) if answers else len(one.prompt)
        last = first + len(one.answer) if answers else len(one.both)
        counted = [first < end and start < last for start, end in encoded.offsets]
        tokens = torch.tensor(encoded.ids)
        ids.append(tokens)
        labels.append(tokens.masked_fill(~torch.tensor(counted), -100))
    mask = [torch.ones_like(tokens) for tokens in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def make_model() -> nn.Module:
    """Return a Llama with random weights."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": _VOCABULARY}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ends, max_position_embeddings=64))
    model.loss_type = "ForCausalLM"
    return model


def train(rows: dict[str, Tensor], seed: int) -> Iterator[tuple[int, nn.Module, dict[str, Tensor]]]:
    """Train from scratch by AdamW with a linear schedule, and yield at each of ``EPOCHS``.

    Yields:
        The epoch, the model, and Adam's bias-corrected second moments by parameter.
    """
    torch.manual_seed(seed)
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    n, n_batches = len(rows["labels"]), -(-len(rows["labels"]) // _BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, EPOCHS[-1] * n_batches)
    for epoch in range(1, EPOCHS[-1] + 1):
        total = 0.0
        for chosen in torch.randperm(n).split(_BATCH):
            longest = int(rows["attention_mask"][chosen].sum(dim=1).max())
            loss = model(**{name: one[chosen, :longest] for name, one in rows.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() / n_batches
        print(f"seed {seed}, epoch {epoch}: loss {total:.3f} nats a token", flush=True)
        if epoch in EPOCHS:
            state = {name: optimizer.state[p] for name, p in model.named_parameters()}
            yield (
                epoch,
                model,
                {
                    name: one["exp_avg_sq"] / (1 - 0.999 ** float(one["step"]))
                    for name, one in state.items()
                },
            )

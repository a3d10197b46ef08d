"""Define the board's texts, model and trainings, which measure effects of dropping texts.

The training is smooth: warm-up, decay to 0, batches of 64. A dropped text has weight 0 in the loss,
whose divisor stays the same, so that trainings with one seed differ only by the dropped texts.
"""

import ast
import hashlib
import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

_BATCH, _WARM_UP, _DECAY = 64, 0.15, 0.01
TIMES = (0.25, 0.5, 0.75, 1.0)
_PERTURBED = 1e-4
DROPS = (1, 10, 50)  # per cent


@dataclass(frozen=True)
class Size:
    """The sizes of a board.

    Attributes:
        texts: n, training pieces.
        questions: m, held-out pieces.
        length: Words in each piece.
        words: Entries of the vocabulary. Entry 0 represents all other words.
        width: Numbers in a hidden state.
        layers: Blocks.
        epochs: Passes over the training pieces.
        rate: The highest learning rate.
        subsets: Drops of each kind with the same seed.
        others: Drops of each kind with two other seeds each.
        again: Drops of each kind that are repeated with perturbed initial weights.
        runs: Trainings on all pieces whose checkpoints are kept.
        halves: Trainings on halves whose checkpoints are kept.
        tuned_from: The name of the text on which the model is trained first, or "" for none.
        seed: Determines the initial weights, orders and drops, but not the pieces.
    """

    texts: int
    questions: int
    length: int
    words: int
    width: int
    layers: int
    epochs: int
    rate: float
    subsets: int
    others: int
    again: int
    runs: int = 4
    halves: int = 8
    tuned_from: str = ""
    seed: int = 0

    @property
    def first_seed(self) -> int:
        """The seed of the run whose scores are measured, and of drops with the same seed."""
        return 100_000 * self.seed

    @property
    def before(self) -> "Size":
        """The sizes of the training on ``tuned_from``, if there is one."""
        return replace(self, texts=2400, epochs=10, rate=1e-3, tuned_from="")


SIZES = {
    "tiny": Size(120, 8, 24, 200, 16, 1, 6, 1e-3, 4, 0, 4, runs=1, halves=2),  # smoke test
    "small": Size(900, 50, 24, 600, 48, 2, 14, 1e-3, 32, 12, 6),
    "brief": Size(900, 50, 24, 600, 48, 2, 14, 1e-3, 24, 0, 4, runs=1, halves=0),
    "evening": Size(1700, 50, 32, 1000, 64, 3, 5, 5e-4, 20, 0, 4, 1, 0, tuned_from="docstrings"),
}


def _words(text: str) -> list[str]:
    """Cut a text into words and signs."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _docstrings() -> list[str]:
    """Return the docstrings of the standard library, with files in a random order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in folder.rglob("*.py")
        if not {"test", "tests", "idlelib", "site-packages"} & set(path.parts)
    )
    found = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for i in np.random.default_rng(0).permutation(len(paths)):
        try:
            tree = ast.parse(paths[i].read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # files with deliberate errors for lib2to3's tests
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        found += [text for node in nodes if (text := ast.get_docstring(node))]
    return found


def _manual() -> list[str]:
    return "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")


TEXTS = {"docstrings": _docstrings, "manual": _manual}


@dataclass(frozen=True)
class Board:
    """Pieces of text as tokens, shape (n + m, length), with the training pieces first."""

    size: Size
    tokens: Tensor
    pieces: list[list[str]]
    numbers: dict[str, int]

    @property
    def digest(self) -> str:
        """A hash of the tokens, which depend on the version of Python."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]

    @property
    def train(self) -> Tensor:
        """The training pieces."""
        return self.tokens[: self.size.texts]

    @property
    def asked(self) -> Tensor:
        """The questions."""
        return self.tokens[self.size.texts :]


@cache
def board(size: Size, text: str) -> Board:
    """Cut texts into pieces, draw the questions among them, and number words by frequency.

    A model that is tuned keeps the word numbers of the text on which it was trained first.
    """
    found: dict[tuple[str, ...], None] = {}
    wanted = size.texts + size.questions
    for one in TEXTS[text]():
        words = _words(one)
        for start in range(0, len(words) - size.length + 1, size.length):
            found[tuple(words[start : start + size.length])] = None
    pieces = [list(piece) for piece in found][:wanted]
    if len(pieces) < wanted:
        sys.exit(f"{text} has {len(pieces)} pieces, and {wanted} are needed")
    order = np.random.default_rng(1).permutation(wanted)
    pieces = [pieces[i] for i in order]
    counts = Counter(word for piece in pieces[: size.texts] for word in piece)
    numbers = {word: i for i, (word, _) in enumerate(counts.most_common(size.words - 1), 1)}
    if size.tuned_from:
        numbers = board(size.before, size.tuned_from).numbers
    tokens = torch.tensor([[numbers.get(word, 0) for word in piece] for piece in pieces])
    return Board(size, tokens, pieces, numbers)


def board_in(folder: Path) -> Board:
    """Return the board of a folder of board.py; exit with an error if its texts differ."""
    given = yaml.safe_load((folder / "about.yaml").read_text(encoding="utf-8"))
    text, digest = given.pop("text"), given.pop("digest")
    about = board(Size(**given), text)
    if about.digest != digest:
        sys.exit("the texts differ: use the same version of Python")
    return about


def make_model(size: Size) -> Any:
    """Return a GPT-2 with initial weights drawn from PyTorch's random state."""
    about: dict[str, Any] = {"n_embd": size.width, "n_layer": size.layers, "n_head": 4}
    about |= {"vocab_size": size.words, "n_positions": size.length}
    about |= {"bos_token_id": None, "eos_token_id": None}
    about |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = GPT2LMHeadModel(GPT2Config(**about))
    model.loss_type = "ForCausalLM"  # the default, but without it transformers warns
    return model


def losses(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """Return the sum of the words' cross entropies for each piece, in nats."""
    logits = model(input_ids=tokens).logits[:, :-1]
    each = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return each.view(len(tokens), -1).sum(1)


def _first_model(size: Size, seed: int, *, perturbed: bool = False) -> Any:
    """Return the model of a seed before training."""
    torch.manual_seed(seed)
    model = make_model(size).train()
    if size.tuned_from:
        model.load_state_dict(_learned_before(size.before, size.tuned_from), strict=False)
    if perturbed:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + _PERTURBED * noise)
    return model


@cache
def _learned_before(size: Size, text: str) -> dict[str, Tensor]:
    return train(board(size, text), size.first_seed, np.ones(size.texts))[1][1.0]["state"]


def train(
    about: Board, seed: int, weights: np.ndarray, *, perturbed: bool = False
) -> tuple[np.ndarray, dict[float, dict[str, dict[str, Tensor]]]]:
    """Train with ``weights`` of texts, (n,); return log p of the questions, and checkpoints.

    A checkpoint consists of a state dict and Adam's bias-corrected second moments. Its key is the
    fraction of the training after which it was saved.
    """
    size = about.size
    model = _first_model(size, seed, perturbed=perturbed)
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(size.texts, generator=generator) for _ in range(size.epochs)]
    batches = [batch for epoch in epochs for batch in epoch.split(_BATCH)]
    total = len(batches)
    warm = max(1, int(_WARM_UP * total))
    optimizer = torch.optim.AdamW(model.parameters(), size.rate, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (total - step) / (total - warm))
    )
    counts, tokens = torch.tensor(weights, dtype=torch.float32), about.train
    divisor = _BATCH * (size.length - 1)
    kept = {round(part * total): part for part in TIMES}
    checkpoints = {}
    for step, rows in enumerate(batches, 1):
        loss = (losses(model, tokens[rows]) * counts[rows]).sum() / divisor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in kept:
            state = {name: p.detach().clone() for name, p in model.named_parameters()}
            moments = {
                name: optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**step)
                for name, p in model.named_parameters()
            }
            checkpoints[kept[step]] = {"state": state, "moments": moments}
    with torch.no_grad():
        return -losses(model, about.asked).double().numpy(), checkpoints


@dataclass(frozen=True)
class Training:
    """One training of the board.

    Attributes:
        name: The name of its file.
        seed: The seed of initial weights and order.
        drop: The percentage of pieces that are left out; 0 for none.
        number: The number of this random choice of pieces.
        perturbed: Whether initial weights are perturbed by 1e-4 of their size.
        keeps: Whether its checkpoints are kept.
    """

    name: str
    seed: int
    drop: int = 0
    number: int = 0
    perturbed: bool = False
    keeps: bool = False

    def weights(self, n: int) -> np.ndarray:
        """Return 0 for pieces that are left out and 1 for all other pieces, shape (n,)."""
        kept = np.ones(n)
        rng = np.random.default_rng([self.drop, self.number])
        kept[rng.permutation(n)[: round(n * self.drop / 100)]] = 0
        return kept

    def run(self, about: Board, folder: Path) -> None:
        """Train, and write log p of the questions, the weights, and the checkpoints to keep."""
        began = time.process_time()
        weights = self.weights(about.size.texts)
        outputs, checkpoints = train(about, self.seed, weights, perturbed=self.perturbed)
        if self.keeps:
            written(folder / f"{self.name}.pt", lambda path: torch.save(checkpoints, path))
        seconds = time.process_time() - began
        values = {"outputs": outputs, "weights": weights, "seconds": seconds}
        written(folder / f"{self.name}.npz", lambda path: save(path, values))


def save(path: Path, values: Mapping[str, Any]) -> None:
    """Write arrays under their names."""
    with path.open("wb") as file:
        np.savez(file, **values)


def written(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name and rename it, so that it is complete if it exists."""
    part = path.with_name(f".{os.getpid()}-{path.name}")
    write(part)
    part.replace(path)


def trainings(size: Size) -> list[Training]:
    """Return all trainings, in an order such that an interrupted run already has useful results."""
    seed = number = size.first_seed
    found = [Training("run-0", seed, keeps=True)]
    found += [
        Training(f"half-{i}", seed + 100 + i, 50, number + 10_000 + i, keeps=True)
        for i in range(size.halves)
    ]
    for i in range(size.subsets):
        found += [Training(f"same-{drop}-{i}", seed, drop, number + i) for drop in DROPS]
        if i < size.again:
            found += [
                Training(f"again-{drop}-{i}", seed, drop, number + i, perturbed=True)
                for drop in DROPS
            ]
    found += [Training(f"run-{i}", seed + i, keeps=True) for i in range(1, size.runs)]
    for i in range(size.others):
        found += [
            Training(f"other-{drop}-{i}-{turn}", seed + 1000 + 2 * i + turn, drop, number + i)
            for drop in DROPS
            for turn in range(2)
        ]
    return found

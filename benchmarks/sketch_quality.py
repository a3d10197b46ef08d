"""How well scores from each kind of projection rank training samples as exact ones do.

    python benchmarks/sketch_quality.py gpt2 llama digits --csv sketch_quality.csv

Each model is trained for a minute or two: a GPT-2 and a Llama with grouped attention and tied
embeddings on beginnings of paragraphs of Python's manual, bytes as tokens; the default study's
network on its digits. Exact are the inner products of whole gradients. "Kronecker a layer" is what
other packages for language models keep: S0^T G S1 of 16 x 16 numbers for each matrix of a layer,
side by side (as many as there are matrices). Scores are those of one checkpoint with damping 2,
without loss weights; figures are means over matrices of several seeds, of the targets' Spearman
correlation over training samples, and of how many of the top ten are the same. "norm" is the root
mean square of |Rg|^2 / |g|^2 - 1. Prints a Markdown table; --csv writes the same rows with the
device, the versions and the commit.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import environment, write_csv
from scipy.stats import rankdata
from torch import Tensor, nn

from trak_core.attribution.project_gradients import Features
from trak_core.gradients import Batch, as_batch, formed_gradients, gradients_at_once
from trak_core.gradients import select_parameters as selected
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.spec import ProjectionKind, ProjectionSpec, matrix_shape

N_TRAIN, N_TARGETS, LENGTH, DAMPING = 300, 30, 64, 2.0
SIDE = 16  # of a Kronecker sketch


def manual() -> Tensor:
    """Return beginnings of paragraphs of Python's manual, shape (texts, LENGTH)."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = [" ".join(p.split()).encode() for p in text.split("\n\n")]
    long = [p[:LENGTH] for p in dict.fromkeys(paragraphs) if len(p) >= LENGTH]
    return torch.tensor([list(p) for p in long[: N_TRAIN + N_TARGETS]])


def language_model(name: str) -> nn.Module:
    """Return an untrained GPT-2 or Llama."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    quiet: dict[str, Any] = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        config = GPT2Config(
            n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH, vocab_size=256, **quiet
        )
        config.loss_type = "ForCausalLM"
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        pad_token_id=None,
        **quiet,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Trained:
    """A trained model, and samples: training samples first, then targets."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ModelOutput
    samples: Batch

    def batches(self) -> Iterator[Batch]:
        """Yield the samples, some at a time."""
        for start in range(0, len(self.samples), 30):
            yield self.samples.rows(slice(start, start + 30))


def trained(name: str, epochs: int) -> Trained:
    """Train a model."""
    torch.manual_seed(0)
    if name == "digits":
        sys.path.insert(0, str(Path(__file__).parents[1] / "config"))
        study = importlib.import_module("digits")
        *_, (_, model) = study.train(seed=0, epochs=epochs)
        train, targets = study.train_data(), study.target_data()
        chosen = [train[i] for i in range(N_TRAIN)] + [targets[i] for i in range(N_TARGETS)]
        samples = torch.utils.data.default_collate(chosen)
        output = CLASSIFICATION
    else:
        model, ids = language_model(name), manual()
        output, samples = LANGUAGE_MODELLING, {"input_ids": ids, "labels": ids}
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        loss = torch.tensor(0.0)
        for epoch in range(epochs):
            for batch in ids[:N_TRAIN][torch.randperm(N_TRAIN)].split(15):
                loss = model(input_ids=batch, labels=batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"<!-- {name}, epoch {epoch}: {loss.item():.2f} nats a byte -->", flush=True)
    model.eval()
    return Trained(model, selected(model, None), output, as_batch(samples, output))


def gradients(of: Trained) -> np.ndarray:
    """Return whole gradients, shape (samples, p)."""
    what = gradients_at_once, of.model, of.parameters, of.output
    parts = [formed_gradients(*what, batch).blocks() for batch in of.batches()]
    return np.concatenate([torch.cat(blocks, dim=1).numpy() for blocks in parts])


def features(of: Trained, kind: str, proj_dim: int, seed: int) -> np.ndarray:
    """Return features of a kind."""
    shapes = [matrix_shape(p.shape) for p in of.parameters.values()]
    spec = ProjectionSpec(
        kind=ProjectionKind(kind),
        n_params=sum(a * b for a, b in shapes),
        proj_dim=proj_dim,
        seed=seed,
        stream=0,
        shapes=shapes if kind == "tensor_sketch" else None,
    )
    rows = []
    for batch in of.batches():
        sums = Features.zeros(of.parameters, spec, len(batch), threads=1)
        gradients_at_once(of.model, of.parameters, of.output, batch, sums)
        rows.append(sums.scaled().numpy())
    return np.concatenate(rows)


def kronecker(of: Trained, whole: np.ndarray, seed: int) -> np.ndarray:
    """Return S0^T G S1 of each matrix with more than SIDE rows and columns, side by side."""
    rng, parts, first = np.random.default_rng(seed), [], 0
    for parameter in of.parameters.values():
        n0, n1 = matrix_shape(parameter.shape)
        block = whole[:, first : first + n0 * n1].reshape(-1, n0, n1)
        first += n0 * n1
        if min(n0, n1) > SIDE:
            s0, s1 = (rng.choice([-1.0, 1.0], (n, SIDE)) / SIDE**0.5 for n in (n0, n1))
            parts.append(
                (s0.T.astype(np.float32) @ block @ s1.astype(np.float32)).reshape(len(whole), -1)
            )
    return np.concatenate(parts, axis=1)


def products(rows: np.ndarray) -> np.ndarray:
    """Return inner products in float64, some columns at a time."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], 2**16):
        part = rows[:, start : start + 2**16].astype(np.float64)
        total += part @ part.T
    return total


def scores(gramian: np.ndarray) -> np.ndarray:
    """Return scores of targets, shape (targets, training samples)."""
    train = gramian[:N_TRAIN, :N_TRAIN]
    damped = train + DAMPING * np.trace(train) / N_TRAIN * np.eye(N_TRAIN)
    return np.linalg.solve(damped, gramian[:N_TRAIN, N_TRAIN:]).T


@dataclass(frozen=True)
class Row:
    """How one kind does on one model."""

    model: str
    n_params: int
    kind: str
    numbers: int
    seeds: int
    norm: float
    spearman: float
    same_of_ten: float


def measured(
    name: str,
    kind: str,
    exact: np.ndarray,
    n_params: int,
    make: Callable[[int], np.ndarray],
    seeds: int,
) -> Row:
    """Compare what ``make`` gives for each seed with what is exact."""
    wanted = scores(exact)
    errors, ranks, same, numbers = [], [], [], 0
    for seed in range(seeds):
        rows = make(seed)
        gramian, numbers = products(rows), rows.shape[1]
        errors.append(np.diagonal(gramian) / np.diagonal(exact) - 1)
        found = scores(gramian)
        pairs = zip(found, wanted, strict=True)
        ranks.append(np.mean([np.corrcoef(rankdata(a), rankdata(b))[0, 1] for a, b in pairs]))
        a, b = (np.argsort(-one, axis=1)[:, :10].tolist() for one in (found, wanted))
        same.append(np.mean([len(set(x) & set(y)) for x, y in zip(a, b, strict=True)]))
    norm = float(np.sqrt(np.mean(np.square(errors))))
    return Row(
        name, n_params, kind, numbers, seeds, norm, float(np.mean(ranks)), float(np.mean(same))
    )


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", choices=["gpt2", "llama", "digits"])
    parser.add_argument("--proj-dims", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    print("| model | p | kind | numbers | norm | Spearman | same of ten |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.models:
        of = trained(name, arguments.epochs)
        whole = gradients(of)
        exact, p = products(whole), whole.shape[1]
        sides: list[tuple[str, Callable[[int], np.ndarray]]] = [
            (kind, partial(features, of, kind, k))
            for k in arguments.proj_dims
            for kind in ("rademacher", "hadamard", "tensor_sketch")
        ]
        sides.append(("Kronecker a layer", partial(kronecker, of, whole)))
        for kind, make in sides:
            row = measured(name, kind, exact, p, make, arguments.seeds)
            rows.append(row)
            print(
                f"| {name} | {p:,} | {kind} | {row.numbers:,} | {row.norm:.3f} | "
                f"{row.spearman:.3f} | {row.same_of_ten:.1f} |",
                flush=True,
            )
    if arguments.csv:
        write_csv(arguments.csv, rows, environment("cpu", ["torch", "transformers", "numba"]))


if __name__ == "__main__":
    main()

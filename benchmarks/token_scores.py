"""What it costs to cut scores by tokens and layers, beside making the same texts' features.

Texts of a GPT-2 with random weights: 40 texts, each the training sample of one score, of two, four
or ten, for targets of as many directions. All sides take turns at each batch; their sums are
compared first. Ratios are medians over batches and rounds, with 95 % bootstrap intervals.

    python benchmarks/token_scores.py
"""

import time
from typing import Any

import numpy as np
import torch
from machine import environment
from transformers import GPT2Config, GPT2LMHeadModel

from trak_core.attribution.project_gradients import Features
from trak_core.attribution.token_shares import Directions, Pairs, Shares
from trak_core.gradients import gradient_method, select_parameters
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.spec import ProjectionKind, ProjectionSpec, matrix_shape

N_TEXTS, BATCH, N_TOKENS, N_WORDS, PROJ_DIM, REPEATS = 40, 8, 128, 4096, 1024, 8


def main() -> None:
    """Print CPU seconds a text and ratios."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": N_TOKENS}
    tokens = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    model: Any = GPT2LMHeadModel(GPT2Config(**size, **tokens, vocab_size=N_WORDS)).eval()
    parameters, output = select_parameters(model, None), TABLE["language_modelling"].load()
    n_params = sum(p.numel() for p in parameters.values())
    texts = torch.randint(N_WORDS, (N_TEXTS, N_TOKENS))
    batches = [{"input_ids": part, "labels": part} for part in texts.split(BATCH)]
    method = gradient_method(model, parameters, output, batches[0])
    print(environment("cpu", ["torch", "transformers", "numpy"]))
    vectors = torch.randn(10, PROJ_DIM)
    print(f"{n_params} parameters, texts of {N_TOKENS} tokens")
    spec = ProjectionSpec(
        kind=ProjectionKind.TENSOR_SKETCH,
        n_params=n_params,
        proj_dim=PROJ_DIM,
        seed=0,
        stream=0,
        shapes=[matrix_shape(p.shape) for p in parameters.values()],
    )

    def features(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sums = Features.zeros(parameters, spec, BATCH, 1)
        method(model, parameters, output, batch, sums)
        return sums.rows

    def shares(batch: dict[str, torch.Tensor], directions: Directions) -> torch.Tensor:
        n_directions = len(directions.vectors)
        pairs = Pairs(
            torch.arange(BATCH).repeat_interleave(n_directions),
            torch.arange(n_directions).repeat(BATCH),
        )
        cut = Shares.zeros(parameters, directions, pairs, N_TOKENS)
        method(model, parameters, output, batch, cut)
        return cut.by_token.sum(1).view(BATCH, n_directions)

    expected = features(batches[0]).double() @ vectors.double().T
    sums = shares(batches[0], Directions(parameters, spec, vectors))
    off = (sums - expected).abs().max() / expected.abs().max()
    assert off < 1e-5, off
    counts = {"features": 0} | {f"{n} scores a text": n for n in (1, 2, 4, 10)}
    seconds: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(REPEATS):
        made: dict[str, Directions] = {}
        own = dict.fromkeys(counts, 0.0)
        for batch in batches:  # all ways take turns at each batch
            for name, n in counts.items():
                began = time.process_time()
                if n == 0:
                    features(batch)
                else:
                    if name not in made:
                        made[name] = Directions(parameters, spec, vectors[:n])
                    shares(batch, made[name])
                own[name] += time.process_time() - began
        for name, total in own.items():
            seconds[name].append(total)
    random = np.random.default_rng(0)
    for name, own in seconds.items():
        ratios = np.array(own) / seconds["features"]
        drawn = np.median(random.choice(ratios, (1000, len(ratios))), axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        print(
            f"{name:16} {np.median(own) / N_TEXTS:.3f} s a text, {np.median(ratios):.2f} "
            f"[{low:.2f}, {high:.2f}] of features"
        )
    print(f"sums are off by {off:.1g} of the largest")


if __name__ == "__main__":
    main()

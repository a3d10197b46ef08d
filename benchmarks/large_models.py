"""Measure the time and memory of features by kind and model, relative to an ordinary training step.

    python benchmarks/large_models.py digits resnet 7M 30M llama 124M --csv large_models.csv
    python benchmarks/large_models.py 124M --linear
    python benchmarks/large_models.py 124M --samples 8 --kinds tensor_sketch --no-vmap
    python benchmarks/large_models.py 103M --tokens 64 --kinds tensor_sketch --no-vmap --one-by-one
    python benchmarks/large_models.py llama_8M lstm_6M --tokens 64 --no-vmap --one-by-one
    python benchmarks/large_models.py 124M --device cuda --samples 8 --no-vmap --precision high

The floor is a forward and backward pass of the same batch with ordinary weight gradients. The
methods ("sides") that are compared with it are:

- each kind of projection: features from one backward pass;
- "vmap": whole gradients of all samples by ``torch.func.vmap``, then projected, as
  ``trak_core.compat`` does for functions of one sample;
- "one by one": whole gradients by autograd, one sample at a time, then projected;
- "in turn": one pass for each sample, which uses the same factors as one pass for all samples.
  Features of an LSTM are computed in this way, because one pass for all samples is not possible.

Features of two samples are first compared with projections of whole gradients in float32. If they
differ, the script ends. Then all sides alternate on one thread each. The table has medians over
rounds of CPU seconds (wall seconds with ``--device cuda``), and ratios to the floor with the
smallest and largest of the rounds. All sides keep freed memory for reuse, as jobs do.

Memory is the peak minus the memory before the model is loaded, divided by the number of samples, in
a separate process for each side. On a GPU it is measured in this process and excludes the model.
The script prints a Markdown table. --csv writes the same rows with the device, the versions and the
commit.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Each side has one thread. This must be set before the imports that follow.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
from shared import FLOOR, environment, floor, peak_on_gpu, print_peak, seconds_of, write_csv
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trak_core.attribution.device import PRECISIONS, float32_precision
from trak_core.attribution.project_gradients import Features
from trak_core.gradients import (
    Batch,
    GradientMethod,
    as_batch,
    as_blocks,
    formed_gradients,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.gradients.gradient_terms import Consumer, Contribution
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.projection import project
from trak_core.runtime.job import keep_freed_memory
from trak_core.settings import ProjectionKind, ProjectionSpec, matrix_shape
from trak_core.study.study import Study

KINDS = ["rademacher", "hadamard", "tensor_sketch"]
TOKENS = 128
# Width, layers, heads, vocabulary, samples a batch.
SIZES = {"7M": (256, 6, 4, 8192, 8), "30M": (512, 8, 8, 8192, 4), "124M": (768, 12, 12, 50257, 2)}
# Width, inner width, layers, heads, heads of keys, vocabulary, samples a batch.
LLAMAS = {
    "llama_8M": (288, 768, 6, 6, 2, 4000, 4),
    "llama": (384, 1024, 8, 6, 2, 16384, 4),
    "103M": (768, 2048, 12, 12, 12, 12000, 1),
}
# Width, layers, vocabulary, samples a batch.
LSTMS = {"lstm_100k": (64, 1, 500, 4), "lstm_6M": (512, 2, 2000, 4), "lstm_21M": (1024, 2, 2000, 4)}


@dataclass(frozen=True)
class Row:
    """Time and memory of one side; ``parameters`` describes the differentiated parameters."""

    model: str
    parameters: str
    n_params: int
    proj_dim: int
    side: str
    ms_a_sample: float
    floors: float
    least: float
    greatest: float
    mb_a_sample: float

    def __str__(self) -> str:
        """Return a line of the table."""
        ms, mb = (f"{float(f'{x:.3g}'):,g}" for x in (self.ms_a_sample, self.mb_a_sample))
        return (
            f"| {self.model} | {self.proj_dim} | {self.side} | {ms} | "
            f"{self.floors:.2f} [{self.least:.2f}-{self.greatest:.2f}] | {mb} |"
        )


class RecurrentModel(nn.Module):
    """Embeddings, LSTM layers, and a linear layer to logits."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        """Keep the sizes."""
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return logits, shape (batch, tokens, vocabulary)."""
        return {"logits": self.head(self.lstm(self.embeddings(input_ids))[0])}


def language_model(name: str, n_samples: int | None, n_tokens: int) -> tuple[nn.Module, Tensor]:
    """Return a model with random weights and a batch of tokens, shape (samples, n_tokens).

    Args:
        name: A key of one of the tables above.
        n_samples: Texts in the batch; None for the model's default.
        n_tokens: At most ``TOKENS`` for GPT-2 and Llama.
    """
    quiet: dict[str, Any] = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if name in LLAMAS:
        width, inner, layers, heads, key_heads, vocabulary, usual = LLAMAS[name]
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            vocab_size=vocabulary,
            max_position_embeddings=TOKENS,
            pad_token_id=None,
            **quiet,
        )
        model = LlamaForCausalLM(config)
    elif name in LSTMS:
        width, layers, vocabulary, usual = LSTMS[name]
        model = RecurrentModel(width, layers, vocabulary)
    else:
        width, layers, heads, vocabulary, usual = SIZES[name]
        config = GPT2Config(
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=TOKENS,
            vocab_size=vocabulary,
            **quiet,
        )
        config.loss_type = "ForCausalLM"  # the default, but without it transformers warns
        model = GPT2LMHeadModel(config)
    return model, torch.randint(0, vocabulary, (n_samples or usual, n_tokens))


class Residual(nn.Module):
    """A residual block of two convolutions with BatchNorm."""

    def __init__(self, width: int) -> None:
        """Keep the width."""
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return images of the same size."""
        return torch.relu(x + self.layers(x))


def resnet() -> nn.Module:
    """Return a ResNet for 3 x 32 x 32 images, 308,266 parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 1), (16, 32, 2), (32, 84, 2)):
        first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [first, nn.BatchNorm2d(outputs), nn.ReLU(), Residual(outputs)]
    return nn.Sequential(
        *layers, Residual(84), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(84, 10)
    )


def spec_of(kind: str, shapes: list[tuple[int, int]], proj_dim: int) -> ProjectionSpec:
    """Return a projection of the gradients of matrices."""
    return ProjectionSpec(
        kind=ProjectionKind(kind),
        n_params=sum(a * b for a, b in shapes),
        proj_dim=proj_dim,
        seed=0,
        stream=0,
        shapes=shapes if kind == "tensor_sketch" else None,
    )


@dataclass(frozen=True)
class Case:
    """A model, some of its parameters, and a batch.

    Attributes:
        model: The model, in evaluation mode.
        parameters: The parameters that are differentiated.
        output: The model output f.
        batch: The samples.
        proj_dim: k.
    """

    name: str
    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ModelOutput
    batch: Batch
    proj_dim: int

    def spec(self, kind: str) -> ProjectionSpec:
        """Return a projection of this model's gradients."""
        return spec_of(
            kind, [matrix_shape(p.shape) for p in self.parameters.values()], self.proj_dim
        )


def case_of(name: str, asked: argparse.Namespace) -> Case:
    """Return the model of a name, such as ``124M``, and random samples for it."""
    torch.manual_seed(0)
    if name in {"digits", "resnet"}:
        if name == "digits":
            study = Study.load(Path(__file__).parents[1] / "config/digits.py")
            model, n_samples, k, shape = study.make_model(), 256, 512, (1, 8, 8)
        else:
            model, n_samples, k, shape = resnet(), 64, 2048, (3, 32, 32)
        samples = torch.randn(n_samples, *shape), torch.randint(0, 10, (n_samples,))
        output = CLASSIFICATION
    else:
        model, ids = language_model(name, asked.samples, asked.tokens)
        samples, output, k = {"input_ids": ids, "labels": ids}, LANGUAGE_MODELLING, 4096
    model.eval().to(asked.device)
    patterns = None
    if asked.linear:
        patterns = [
            n
            for n, p in model.named_parameters()
            if p.ndim == 2 and not re.search(r"embed|wte|wpe|lm_head", n)
        ]
    return Case(
        name,
        model,
        select_parameters(model, patterns),
        output,
        as_batch(samples, output).mapped(lambda tensor: tensor.to(asked.device)),
        asked.proj_dim or k,
    )


def ours(
    case: Case, kind: str, batch: Batch | None = None, method: GradientMethod | None = None
) -> Tensor:
    """Return features by ``method``, by default one backward pass (for an LSTM one per sample)."""
    batch = case.batch if batch is None else batch
    method = method or (gradients_in_turn if case.name in LSTMS else gradients_at_once)
    sums = Features(case.parameters, case.spec(kind), len(batch), threads=1)
    method(case.model, case.parameters, case.output, batch, sums)
    return sums.scaled()


class Nobody(Consumer):
    """A consumer that discards all gradients."""

    totals = ()

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """Discard the gradients, without computing factored ones in full."""


def by_vmap(case: Case, kind: str) -> Tensor:
    """Return features from whole gradients by vmap."""
    trained = {name: p.detach() for name, p in case.parameters.items()}
    state = *case.model.named_parameters(), *case.model.named_buffers()
    fixed = {name: tensor.detach() for name, tensor in state if name not in trained}

    def f(
        trained: dict[str, Tensor],
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        label: Tensor,
    ) -> Tensor:
        args = tuple(tensor.unsqueeze(0) for tensor in args)
        kwargs = {name: tensor.unsqueeze(0) for name, tensor in kwargs.items()}
        returned = functional_call(case.model, (trained, fixed), args, kwargs)
        return case.output.value(case.output.read(returned).squeeze(0), label)

    batch = case.batch
    # Fused attention has no vmap rule.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradients = vmap(grad(f), (None, 0, 0, 0))(trained, batch.args, batch.kwargs, batch.labels)
    return project(as_blocks(gradients.values()), case.spec(kind), scale=True)


def check(case: Case, kind: str) -> None:
    """Exit with an error if two samples' features differ from projections of whole gradients."""
    few = case.batch.rows(slice(0, 2))
    what = case.model, case.parameters, case.output, few
    formed = formed_gradients(gradients_one_by_one, *what)
    expected = project(formed.blocks(), case.spec(kind), scale=True)
    difference = (ours(case, kind, few) - expected).norm() / expected.norm()
    if difference > 1e-5:
        raise SystemExit(f"{case.name}, {kind}: features differ by {difference:.1g}")


def sides_of(case: Case, asked: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    sides: dict[str, Callable[[], object]] = {
        FLOOR: partial(floor, case.model, case.output, case.batch)
    }
    if asked.no_features:
        given = case.model, case.parameters, case.output, case.batch
        sides["no features"] = partial(gradients_at_once, *given, Nobody())
    for kind in asked.kinds:
        sides[kind] = partial(ours, case, kind)
        if not asked.no_vmap:
            sides[f"vmap + {kind}"] = partial(by_vmap, case, kind)
        if asked.one_by_one:
            ways = {"in turn": gradients_in_turn, "one by one": gradients_one_by_one}
            if len(case.batch) == 1 or case.name in LSTMS:
                del ways["in turn"]  # which is ours
            for way, method in ways.items():
                sides[f"{way} + {kind}"] = partial(ours, case, kind, method=method)
    return sides


def warm_up(kinds: list[str], proj_dim: int) -> None:
    """Compile each kind's kernel, and fill the caches."""
    for kind in kinds:
        project(torch.randn(2, 5000), spec_of(kind, [(50, 100)], proj_dim))


def measured(case: Case, asked: argparse.Namespace) -> Iterator[Row]:
    """Time a model's sides, then print and yield a row for each of them."""
    sides, n_samples = sides_of(case, asked), len(case.batch)
    seconds = seconds_of(sides, asked.rounds, asked.device)
    unit = statistics.median(seconds[FLOOR])
    options = [word for word in sys.argv[1:] if word not in asked.models]
    for side, taken in seconds.items():
        peak_bytes = float("nan")
        if asked.device == "cuda":
            peak_bytes = peak_on_gpu(sides[side])
        elif not asked.no_memory:
            command = [sys.executable, __file__, case.name, *options, "--peak", side]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peak_bytes = 1024 * int(output.split()[-1])
        row = Row(
            case.name,
            "linear" if asked.linear else "all",
            sum(p.numel() for p in case.parameters.values()),
            case.proj_dim,
            side,
            1000 * statistics.median(taken) / n_samples,
            statistics.median(taken) / unit,
            min(taken) / unit,
            max(taken) / unit,
            peak_bytes / 1e6 / n_samples,
        )
        print(row, flush=True)
        yield row


def main() -> None:
    """Measure all sides, or with ``--peak`` the peak memory of one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", help="digits, resnet, or a name of a table above")
    parser.add_argument("--linear", action="store_true", help="only matrices of the layers")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--proj-dim", type=int)
    parser.add_argument("--samples", type=int, help="texts of a batch")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-vmap", action="store_true")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--no-features", action="store_true", help="the pass alone, too")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="highest", help="of float32")
    parser.add_argument("--dtype", default="float32", help="of the model, such as bfloat16")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if asked.peak:
        case = case_of(asked.models[0], asked)
        case.model.to(getattr(torch, asked.dtype))
        warm_up(asked.kinds, case.proj_dim)
        print_peak(sides_of(case, asked)[asked.peak])
        return
    print("| model | k | side | ms a sample | floors | MB a sample |\n|---|---|---|---|---|---|")
    rows: list[Row] = []
    for name in asked.models:
        case = case_of(name, asked)
        exact: dict[str, Tensor] = {}
        with float32_precision("highest"):
            for kind in asked.kinds:
                check(case, kind)
                exact[kind] = ours(case, kind)
        case.model.to(getattr(torch, asked.dtype))
        with float32_precision(asked.precision):
            for kind, features in exact.items():
                rounding = (ours(case, kind) - features).norm() / features.norm()
                print(f"{kind}: {rounding:.1g} from features in float32", file=sys.stderr)
            rows += measured(case, asked)
    if asked.csv:
        about = environment(asked.device, ["torch", "transformers", "numba", "numba-cuda"])
        write_csv(asked.csv, rows, about | {"precision": asked.precision, "dtype": asked.dtype})


if __name__ == "__main__":
    main()

"""Measure the time and memory of features by kind and model, relative to an ordinary training step.

    python benchmarks/large_models.py digits resnet 7M 30M llama 124M --csv large_models.csv
    python benchmarks/large_models.py 124M --linear
    python benchmarks/large_models.py 124M --samples 8 --kinds tensor_sketch --no-vmap
    python benchmarks/large_models.py 103M --tokens 64 --kinds tensor_sketch --no-vmap --one-by-one
    python benchmarks/large_models.py xlnet mixtral lstm_6M --tokens 64 --no-vmap --one-by-one
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
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Each side has one thread. This must be set before the imports that follow.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
from shared import (
    FLOOR,
    HEADER,
    LSTMS,
    TOKENS,
    Row,
    environment,
    floor,
    language_model,
    measured,
    print_peak,
    write_csv,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

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

KINDS = ["rademacher", "hadamard", "tensor_sketch"]


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
        shapes = [matrix_shape(p.shape) for p in self.parameters.values()]
        return ProjectionSpec(
            kind=ProjectionKind(kind),
            n_params=sum(a * b for a, b in shapes),
            proj_dim=self.proj_dim,
            seed=0,
            stream=0,
            shapes=shapes if kind == "tensor_sketch" else None,
        )


def case_of(
    name: str,
    linear: bool,
    proj_dim: int | None,
    texts: int | None,
    n_tokens: int,
    device: str = "cpu",
) -> Case:
    """Return a model and random samples for it.

    Args:
        name: The first word of a row, such as ``124M``.
        linear: Whether only the weight matrices of a transformer's layers are differentiated.
        proj_dim: k; None for the model's default.
        texts: The number of texts in a language model's batch; None for the model's default.
        n_tokens: The number of tokens in each text.
        device: The device of the model and the samples.
    """
    torch.manual_seed(0)
    if name in {"digits", "resnet"}:
        if name == "digits":
            sys.path.insert(0, str(Path(__file__).parents[1] / "config"))
            study = importlib.import_module("digits")
            model, n_samples, k = study.make_model(), 256, 512
            shape = tuple(study.train_data()[0][0].shape)
        else:
            model, n_samples, k, shape = resnet(), 64, 2048, (3, 32, 32)
        samples = torch.randn(n_samples, *shape), torch.randint(0, 10, (n_samples,))
        output = CLASSIFICATION
    else:
        model, ids = language_model(name, texts, n_tokens)
        samples, output, k = {"input_ids": ids, "labels": ids}, LANGUAGE_MODELLING, 4096
    model.eval().to(device)
    patterns = None
    if linear:
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
        as_batch(samples, output).mapped(lambda tensor: tensor.to(device)),
        proj_dim or k,
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


def sides_of(
    case: Case, kinds: list[str], vmap: bool, one_by_one: bool, no_features: bool
) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    sides: dict[str, Callable[[], object]] = {
        FLOOR: partial(floor, case.model, case.output, case.batch)
    }
    if no_features:
        given = case.model, case.parameters, case.output, case.batch
        sides["no features"] = partial(gradients_at_once, *given, Nobody())
    for kind in kinds:
        sides[kind] = partial(ours, case, kind)
        if vmap:
            sides[f"vmap + {kind}"] = partial(by_vmap, case, kind)
        if one_by_one:
            ways = {"in turn": gradients_in_turn, "one by one": gradients_one_by_one}
            if len(case.batch) == 1 or case.name in LSTMS:
                del ways["in turn"]  # which is ours
            for way, method in ways.items():
                sides[f"{way} + {kind}"] = partial(ours, case, kind, method=method)
    return sides


def warm_up(kinds: list[str], proj_dim: int) -> None:
    """Compile each kind's kernel, and fill the caches."""
    for kind in kinds:
        shapes = [(50, 100)] if kind == "tensor_sketch" else None
        spec = ProjectionSpec(
            kind=ProjectionKind(kind),
            n_params=5000,
            proj_dim=proj_dim,
            seed=0,
            stream=0,
            shapes=shapes,
        )
        project(torch.randn(2, 5000), spec)


def main() -> None:
    """Measure all sides, or with ``--peak`` the peak memory of one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", help="digits, resnet, or a model of shared.py")
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[Row] = []
    if not arguments.peak:
        print(HEADER, flush=True)
    for name in arguments.models:
        case = case_of(
            name,
            arguments.linear,
            arguments.proj_dim,
            arguments.samples,
            arguments.tokens,
            arguments.device,
        )
        ways = not arguments.no_vmap, arguments.one_by_one, arguments.no_features
        sides = sides_of(case, arguments.kinds, *ways)
        exact: dict[str, Tensor] = {}
        if not arguments.peak:
            with float32_precision("highest"):
                for kind in arguments.kinds:
                    check(case, kind)
                    exact[kind] = ours(case, kind)
        case.model.to(getattr(torch, arguments.dtype))
        if arguments.peak:
            warm_up(arguments.kinds, case.proj_dim)
            print_peak(sides[arguments.peak])
            return
        row = partial(
            Row,
            name,
            "linear" if arguments.linear else "all",
            sum(p.numel() for p in case.parameters.values()),
            case.proj_dim,
        )
        others = [word for word in sys.argv[1:] if word not in arguments.models]
        own = None if arguments.no_memory else [name, *others]
        with float32_precision(arguments.precision):
            for kind, features in exact.items():
                rounding = (ours(case, kind) - features).norm() / features.norm()
                print(f"{kind}: {rounding:.1g} from features in float32", file=sys.stderr)
            rows += measured(sides, arguments.rounds, len(case.batch), row, own, arguments.device)
    if arguments.csv:
        packages = ["torch", "transformers", "numba", "numba-cuda"]
        own = {"precision": arguments.precision, "dtype": arguments.dtype}
        write_csv(arguments.csv, rows, environment(arguments.device, packages) | own)


if __name__ == "__main__":
    main()

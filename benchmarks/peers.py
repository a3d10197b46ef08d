"""Compare other packages' gradient sketches of language models with an ordinary training step.

    PYTHONPATH=. /tmp/peers/bergson/bin/python benchmarks/peers.py bergson 7M 30M 124M --csv b.csv
    PYTHONPATH=. /tmp/peers/dattri/bin/python benchmarks/peers.py dattri 7M 30M 124M --csv d.csv
    PYTHONPATH=. /tmp/peers/logix/bin/python benchmarks/peers.py logix 7M 30M 124M --csv l.csv

Each package has its own environment in /tmp/peers, for Python 3.11:

    for peer in bergson dattri logix; do python3 -m venv $peer; done
    bergson/bin/python -m pip install torch==2.13.0+cpu transformers==5.23.0 bergson==2.5.1
    bergson/bin/python -m pip uninstall --yes torchvision torchaudio
    dattri/bin/python -m pip install torch==2.13.0+cpu transformers==5.23.0 dattri==0.3.0
    logix/bin/python -m pip install torch==2.13.0+cpu transformers==5.23.0 einops pyyaml tqdm
    logix/bin/python -m pip install --no-deps --ignore-requires-python logix-ai==0.1.1

bergson requires torchvision and torchaudio. PyPI's builds of both are for CUDA, and with a CPU
build of torch they break the import of transformers. LogIX's metadata excludes Python 3.11, but its
code works. dattri calls ``torch.compile``, which needs a C++ compiler.

Models, batches, the floor, and the measurement of time and memory are those of
benchmarks/large_models.py. For each package, the time is that of a forward and backward pass that
computes S0^T G S1, 16 x 16 numbers, for each text and each matrix G of attention and MLPs. No
package uses embeddings and norms here, and only dattri uses biases. Parameters that are not used
are frozen, except for the input embeddings with bergson, whose jobs differentiate them. 16 is the
value that bergson documents. The default of dattri and LogIX is 64 (``--side 64``). For these two,
GPT-2's ``Conv1D`` is rewritten as ``nn.Linear``, as in their examples. The first text's sketches
are compared with those of autograd's gradient, and a package whose sketches differ is not timed.
"""

import argparse
import copy
import importlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Each side has one thread. This must be set before the imports that follow.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch
from shared import (
    FLOOR,
    HEADER,
    SIZES,
    Row,
    environment,
    floor,
    language_model,
    measured,
    print_peak,
    write_csv,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from trak_core.gradients import as_batch
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING


@dataclass(frozen=True)
class Peer:
    """A package that is set up for a model.

    Attributes:
        sketches: A function from tokens, shape (texts, tokens), to sketches, shape (texts,
            numbers).
        matrices: For each layer, in the sketches' order: S0, shape (outputs, side), and S1, shape
            (inputs, side), with one more row if the bias is used.
    """

    sketches: Callable[[Tensor], Tensor]
    matrices: dict[str, tuple[Tensor, Tensor]]


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the sum of cross entropies of each text."""
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, ids[:, 1:].flatten(), reduction="none").view(len(ids), -1).sum(1)


def layers_of(body: nn.Module) -> dict[str, Any]:
    """Return the layers of attention and MLPs of a GPT-2 without its head, by name."""
    return {n: m for n, m in body.named_modules() if isinstance(m, nn.Linear | Conv1D)}


def with_linear_layers(model: Any) -> Any:
    """Return a copy in which ``nn.Linear`` replaces ``Conv1D``."""
    model = copy.deepcopy(model)
    for name, old in layers_of(model.base_model).items():
        new = nn.Linear(*old.weight.shape)
        new.weight.data, new.bias.data = old.weight.data.T.contiguous(), old.bias.data
        parent, _, last = name.rpartition(".")
        setattr(model.base_model.get_submodule(parent), last, new)
    return model


def bergson(model: Any, ids: Tensor, side: int) -> Peer:
    """Set up bergson's collector as its jobs do, but keep its results in memory."""
    package = importlib.import_module("bergson")
    model = copy.deepcopy(model).requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    config = package.IndexConfig(run_path="unused", projection_dim=side)
    collector = package.InMemoryCollector(
        model=model.base_model,
        cfg=config,
        data=importlib.import_module("datasets").Dataset.from_dict({"input_ids": ids.tolist()}),
        processor=package.GradientProcessor(projection_dim=side),
    )
    step = importlib.import_module("bergson.collector.collector").fwd_bwd_factory(config)

    def sketches(ids: Tensor) -> Tensor:
        with collector.with_batch():
            of_texts = step(model, ids, ids, {})
        collector.process_batch(list(range(len(ids))), losses=of_texts)
        return torch.from_numpy(collector.builder.grad_buffer)

    def matrix(name: str, size: int, role: str) -> Tensor:
        return collector.projection(name, side, size, role, ids.device, torch.float32).T

    found = layers_of(model.base_model)
    matrices = {n: (matrix(n, m.nf, "left"), matrix(n, m.nx, "right")) for n, m in found.items()}
    return Peer(sketches, matrices)


def dattri(model: Any, ids: Tensor, side: int) -> Peer:
    """Set up dattri's layers as its LoGra attributor does."""
    folder = "dattri.algorithm.block_projected_if.core"
    setup = importlib.import_module(f"{folder}.compressor").setup_model_compressors
    manager = importlib.import_module(f"{folder}.hook").HookManager
    model = with_linear_layers(model).requires_grad_(False)
    layers = layers_of(model.base_model)
    for layer in layers.values():
        layer.requires_grad_(True)
    common = {"device": "cpu", "proj_max_batch_size": 64}
    compressors = setup(
        model.base_model,
        list(layers),
        sparsifier_kwargs=common | {"proj_dim": side, "proj_type": "normal"},
        projector_kwargs=common | {"proj_dim": -1, "proj_type": "identity"},
        sample_inputs={"input_ids": ids[:, :2]},
    )
    hooks = manager(model.base_model, list(layers))
    hooks.set_compressors(compressors)

    def sketches(ids: Tensor) -> Tensor:
        model.zero_grad()
        losses(model, ids).mean().backward()  # dattri expects the loss in this form
        return torch.cat(hooks.get_compressed_grads(), dim=1)

    matrices = {}
    for (name, layer), compressor in zip(layers.items(), compressors, strict=True):
        s0, s1 = compressor.sparsifier.sparsifier_comp
        outputs, inputs = layer.out_features, layer.in_features + 1
        matrices[name] = s0(torch.eye(outputs)), s1(torch.eye(inputs))
        # This call compiles the code, so that the measured memory excludes the compilation.
        compressor.forward(torch.zeros(*ids.shape, outputs), torch.zeros(*ids.shape, inputs))
    return Peer(sketches, matrices)


def logix(model: Any, ids: Tensor, side: int) -> Peer:
    """Set up LogIX with its random LoRA, which logs gradients times two random matrices."""
    package = importlib.import_module("logix")
    model = with_linear_layers(model)
    names = list(layers_of(model.base_model))
    logging.disable(logging.INFO)  # LogIX logs every module
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(f"root_dir: {folder}\nlora:\n  init: random\n  rank: {side}\n")
        run = package.LogIX(project="peers", config=str(config))
        run.watch(model.base_model, name_filter=["attn", "mlp"])
        run.add_lora()
    run.setup({"grad": ["log"]})

    def sketches(ids: Tensor) -> Tensor:
        with run(data_id=range(len(ids))):
            model.zero_grad()
            losses(model, ids).sum().backward()
        _, log = run.get_log()
        return torch.cat([log[f"{n}.logix_lora_B"]["grad"].flatten(1) for n in names], dim=1)

    added = ((n, model.base_model.get_submodule(n)) for n in names)
    return Peer(sketches, {n: (m.logix_lora_C.weight, m.logix_lora_A.weight.T) for n, m in added})


PEERS = {"bergson": bergson, "dattri": dattri, "logix": logix}


def check(peer: Peer, model: Any, ids: Tensor) -> None:
    """Exit with an error if the first text's sketches differ from those of autograd's gradient."""
    losses(model, ids[:1]).sum().backward()
    expected = []
    for name, (s0, s1) in peer.matrices.items():
        layer = model.base_model.get_submodule(name)  # a Conv1D: (inputs, outputs)
        gradient = torch.cat([layer.weight.grad, layer.bias.grad[None]])[: len(s1)]
        expected.append((s0.T @ gradient.T @ s1).flatten())
    model.zero_grad(set_to_none=True)
    found, wanted = peer.sketches(ids)[0], torch.cat(expected)
    difference = (found - wanted).norm() / wanted.norm()
    if not difference < 1e-5:
        raise SystemExit(f"sketches differ by {difference:.1g}")


def main() -> None:
    """Measure all sides, or with ``--peak`` the peak memory of one side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("models", nargs="+", choices=SIZES)
    parser.add_argument("--side", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.models:
        torch.manual_seed(0)
        model, ids = language_model(name)
        model.eval()
        batch = as_batch({"input_ids": ids, "labels": ids}, LANGUAGE_MODELLING)
        peer = PEERS[arguments.peer](model, ids, arguments.side)
        side = f"{arguments.peer}, {arguments.side} x {arguments.side} a matrix"
        sides: dict[str, Callable[[], object]] = {
            FLOOR: partial(floor, model, LANGUAGE_MODELLING, batch),
            side: partial(peer.sketches, ids),
        }
        if arguments.peak:
            print_peak(sides[arguments.peak])
            return
        check(peer, model, ids)
        if not rows:
            print(HEADER, flush=True)
        n_params = sum(len(s0) * len(s1) for s0, s1 in peer.matrices.values())
        numbers = len(peer.matrices) * arguments.side**2
        row = partial(Row, name, "linear", n_params, numbers)
        options = [arguments.peer, name, "--side", str(arguments.side)]
        rows += measured(sides, arguments.rounds, len(ids), row, options)
    if arguments.csv:
        packages = ["torch", "transformers", "bergson", "dattri", "logix-ai"]
        write_csv(arguments.csv, rows, environment("cpu", packages))


if __name__ == "__main__":
    main()

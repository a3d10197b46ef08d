"""A question to a finished run beside Captum's ``influence`` and bergson's ``query``.

    python benchmarks/question_peers.py --captum ~/captum/bin/python --bergson ~/bergson/bin/python

Both have environments of their own. Captum's has this project's packages and ``captum==0.9.0``;
bergson's is made as benchmarks/peers.py says. Study and questions are those of
benchmarks/questions.py; what is in ``--folder`` is taken. Each round types the same questions into
a process of each side in turn, with one thread. The first answer counts from the process's start,
imports included.

``TracInCP`` takes the weights of all linear layers, since it differentiates no others for several
samples at once, the three checkpoints, and the 300 texts in batches of 20; it keeps nothing, so
each call differentiates them again.
``TracInCPFast`` knows no tokens: its last layer has one row a sample. bergson's query has one
checkpoint, here the last, and cosines of gradients by 16 x 16 numbers a matrix, its default, from
an index that is made first. Captum's scores of one text are compared with autograd's. The methods
differ, and so do the answers.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# For all that follows: one thread a side, and no network.
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

_PROMPT = "Enter your query: "  # bergson's
Answers = Callable[[dict[str, Any]], Any]


def _open() -> Answers:
    """Return what answers a question as in a notebook of ours."""
    import torch

    import trak_core

    torch.set_num_threads(1)
    results = trak_core.open("results")
    return lambda row: results.ask(row, 3).said()


def _captum() -> Answers:
    """Return what answers a question by Captum, having compared one score with autograd's."""
    import torch
    from safetensors.torch import load_file
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    saved = sorted(Path("out").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    tokenizer: Any = AutoTokenizer.from_pretrained("out")
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved[-1]))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.lm(input_ids=tokens).logits

    def batch(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        tokens = [torch.tensor(tokenizer(row["text"])["input_ids"]) for row in rows]
        padded = [
            pad_sequence(tokens, batch_first=True, padding_value=value) for value in (0, -100)
        ]
        return padded[0], padded[1]  # no token sees those after it

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    loss.reduction = "sum"  # pyright: ignore[reportFunctionMemberAccess] -- where Captum looks

    def load(model: Any, path: str) -> float:
        model.lm.load_state_dict(load_file(Path(path, "model.safetensors")))
        return 1.0

    model = Logits().eval()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]

    def traced(rows: list[dict[str, Any]]) -> Any:
        loader: Any = DataLoader(rows, batch_size=20, collate_fn=batch)  # pyright: ignore[reportArgumentType]
        paths = [str(path) for path in saved]
        package = importlib.import_module("captum.influence")
        return package.TracInCP(
            model, loader, paths, load, linear, loss, sample_wise_grads_per_batch=True
        )

    asked, expected = rows[1], 0.0
    for path in saved:
        load(model, str(path))
        weights: Any = [model.get_submodule(name).weight for name in linear]
        sides = [
            torch.autograd.grad(loss(model(tokens), labels), weights)
            for tokens, labels in (batch([row]) for row in (rows[0], asked))
        ]
        expected += sum(float((a * b).sum()) for a, b in zip(*sides, strict=True))
    found = float(traced(rows[:1]).influence(batch([asked]))[0, 0])
    assert abs(found - expected) <= 1e-4 * abs(expected), (found, expected)
    tracin = traced(rows)
    return lambda row: tracin.influence(batch([row]), k=3).indices.tolist()


def _index(python: str, folder: Path) -> float:
    """Make bergson's index of the last checkpoint; return its seconds."""
    last = max((folder / "out").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    shutil.copytree(last, folder / "model", dirs_exist_ok=True)
    for path in (folder / "out").glob("tokenizer*"):
        shutil.copy(path, folder / "model")
    # Its batches count tokens, and may hold no more than the model has positions.
    of_texts = ["--dataset", "train.jsonl", "--prompt_column", "text", "--token_batch_size", "256"]
    command = [_bergson(python), "build", "index", "--model", "model", *of_texts, "--overwrite"]
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def _bergson(python: str) -> str:
    return str(Path(python).with_name("bergson"))


def _answer(answers: Answers) -> None:
    """Answer lines until there are no more."""
    for line in sys.stdin:
        print(answers(json.loads(line)), "\n", flush=True)


def main() -> None:
    """Make what is asked, and type the questions into each side in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--captum", help="the Python of Captum's environment")
    parser.add_argument("--bergson", help="the Python of bergson's environment")
    parser.add_argument("--folder", type=Path, help="where texts, checkpoints and the run stay")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=4, help="a round")
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    parser.add_argument("--side", choices=("open", "captum"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        _answer(_open() if asked.side == "open" else _captum())
        return
    from machine import environment, write_csv
    from questions import ASK, Row, finish, seconds, typed

    about = environment("cpu", ("torch", "transformers"))
    print(about)
    with tempfile.TemporaryDirectory() as name:
        folder = (asked.folder or Path(name)).resolve()
        folder.mkdir(exist_ok=True)
        finish(folder)
        held = (folder / "held.jsonl").read_bytes().splitlines()[: asked.questions]
        # bergson's questions are lines of text.
        texts = [json.loads(line)["text"].replace("\n", " ").encode() for line in held]
        script = str(Path(__file__).resolve())
        sides: dict[str, tuple[Sequence[str], list[bytes], bytes]] = {
            "trak ask": (ASK, held, b"\n\n"),
            "trak_core.open().ask": ([sys.executable, script, "--side=open"], held, b"\n\n"),
        }
        if asked.captum:
            command = [asked.captum, script, "--side=captum"]
            sides["captum, TracInCP.influence"] = (command, held, b"\n\n")
        if asked.bergson:
            print(f"bergson build: {_index(asked.bergson, folder):.1f} s")
            command = [_bergson(asked.bergson), "query", "--index", "index", "--top_k", "3"]
            sides["bergson query, one checkpoint"] = (command, texts, _PROMPT.encode())
        taken = {side: [] for side in sides}
        for _ in range(asked.rounds):
            for side, (command, lines, end) in sides.items():
                taken[side].append(typed(command, folder, lines, end))
    print("| an answer | wall, s | CPU, s |\n|---|---|---|")
    rows: list[Row] = []
    for when, part in (("first", slice(0, 1)), ("further", slice(1, None))):
        of_when = [
            seconds(f"{side}, {when}", [pair for one in taken[side] for pair in one[part]])
            for side in sides
        ]
        ratios = ", ".join(f"{row.way} {row.cpu / of_when[0].cpu:.3g}" for row in of_when[1:])
        print(f"CPU seconds in those of trak ask: {ratios}", flush=True)
        rows += of_when
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

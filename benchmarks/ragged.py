"""Features of texts as long as they are, beside the same texts padded to the longest: in one run.

    python benchmarks/ragged.py

The texts are paragraphs of Python's manual, a byte a token, cut at 512; the model is a GPT-2 of a
million parameters with random weights. Each side is a whole job, ``compute_features``, in the
default settings: the study, its checkpoint, the checks beforehand, features, the file. Features and
model outputs of both are compared first, and nothing is timed if they differ. Then the sides take
turns, on one thread; times are CPU seconds. Prints a Markdown table, the ratio over the padded side
with the least and the greatest of the rounds.
"""

import argparse
import contextlib
import io
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

# For all that follows: one thread a side.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

from pydoc_data.topics import topics

import numpy as np
import torch
from machine import environment
from sides import seconds_of
from torch import Tensor, nn

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.spec import FeaturesSpec
from trak_core.stages.compute_features import compute_features

LONGEST, N_TEXTS, PROJ_DIM = 512, 400, 1024
# What differs between the sides: a study's file each.
STUDY = """
from ragged import make_model, {side} as train_data
"""


def texts() -> list[Tensor]:
    """Return the tokens of the paragraphs, in the order of the manual."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = [" ".join(p.split()).encode() for p in text.split("\n\n")]
    chosen = [p for p in dict.fromkeys(paragraphs) if len(p) >= 2][:N_TEXTS]
    return [torch.tensor(list(p[:LONGEST])) for p in chosen]


def ragged() -> list[dict[str, Tensor]]:
    """Return the texts as they are."""
    return [{"input_ids": tokens, "labels": tokens} for tokens in texts()]


def padded() -> list[dict[str, Tensor]]:
    """Return the texts padded to the longest, with what says so."""
    samples = []
    for tokens in texts():
        own = torch.zeros(LONGEST, dtype=torch.int64)
        own[: len(tokens)] = tokens
        mask = (torch.arange(LONGEST) < len(tokens)).long()
        samples.append({"input_ids": own, "attention_mask": mask, "labels": own})
    return samples


def make_model() -> nn.Module:
    """Return a GPT-2 of a million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 144, "n_layer": 4, "n_head": 4, "n_positions": LONGEST, "vocab_size": 256}
    ids = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**size, **ids))


def job(folder: Path, side: str) -> Path:
    """Compute features of one side's study and return their file."""
    spec = FeaturesSpec(
        model_output="language_modelling",
        parameter_patterns=None,
        projection={"proj_dim": PROJ_DIM, "seed": 0},
        dtype="float32",
        study_digest="",
        checkpoint="c0",
        split="train",
    )
    file = folder / f"{side}.h5"
    with contextlib.redirect_stdout(io.StringIO()):
        compute_features(
            features=file,
            checkpoint=folder / "c0.pt",
            study_file=folder / f"{side}_study.py",
            spec=spec,
            code="",
            device="cpu",
            batch_size=64,
            memory_mb=1000,
            threads=1,
        )
    return file


def read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return features and model outputs."""
    with open_artifact(file, FEATURES) as found:
        return found.matrix("features")[:], found.vector("outputs")


def check(ours: Path, theirs: Path) -> float:
    """Return how far features differ, relative to their size; stop if that is more than rounding.

    Raises:
        SystemExit: If they do, or if model outputs do.
    """
    pairs = zip(read(ours), read(theirs), strict=True)
    features, outputs = (float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    if max(features, outputs) > 1e-5:
        raise SystemExit(f"features differ by {features:.1g}, model outputs by {outputs:.1g}")
    return features


def main() -> None:
    """Compare both sides, then time them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = [len(tokens) for tokens in texts()]
    model = make_model()
    n_params = sum(p.numel() for p in model.parameters())
    print(", ".join(f"{k} {v}" for k, v in environment("cpu", ["torch", "transformers"]).items()))
    print(
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens, "
        f"{statistics.mean(lengths):.0f} on average; {n_params:,} parameters",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(model.state_dict(), folder / "c0.pt")
        for side in ("ragged", "padded"):
            (folder / f"{side}_study.py").write_text(STUDY.format(side=side), encoding="utf-8")
        difference = check(job(folder, "ragged"), job(folder, "padded"))
        print(f"features differ by {difference:.1g}\n")
        sides: dict[str, Callable[[], object]] = {
            side: partial(job, folder, side) for side in ("padded", "ragged")
        }
        seconds = seconds_of(sides, arguments.rounds)
    unit = statistics.median(seconds["padded"])
    print("| texts | CPU seconds | over padded |\n|---|---|---|")
    for side, taken in seconds.items():
        ratios = [one / unit for one in taken]
        print(
            f"| {side} | {statistics.median(taken):.1f} | {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}-{max(ratios):.2f}] |"
        )


if __name__ == "__main__":
    main()

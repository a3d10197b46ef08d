"""Functions for benchmarks: the machine, methods that alternate ("sides"), a floor, models.

The floor is an ordinary forward and backward pass of the same batch. Times are CPU seconds, or on
GPUs wall seconds. Ratios are relative to the floor's median. Memory is the peak minus the memory
before the model is loaded, which the same script measures with ``--peak SIDE`` in a separate
process for each side. On a GPU it is the memory that torch allocates there. This module imports
only torch, because the environments of other packages lack this project's dependencies.
"""

import csv
import ctypes
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    return {package: installed[package] for package in packages if package in installed}


def environment(device: str, packages: Iterable[str]) -> dict[str, str]:
    """Return the device's name, the versions of Python and the packages, and the commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    python = platform.python_version()
    return {"device": name, "python": python, **_versions(packages), "commit": commit}


def seconds_now(device: str, *, by_clock: bool = False) -> float:
    """Return this process's CPU time, or for ``cuda`` the wall time after the GPU has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.perf_counter() if by_clock else time.process_time()


def write_csv(path: Path, rows: Sequence[Any], about: dict[str, str]) -> None:
    """Write rows, which are dataclasses, with the additional columns ``about``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*asdict(rows[0]), *about])
        writer.writeheader()
        writer.writerows(asdict(row) | about for row in rows)


FLOOR = "floor"
HEADER = "| model | k | side | ms a sample | floors | MB a sample |\n|---|---|---|---|---|---|"


def floor(model: nn.Module, output: Any, batch: Any) -> None:
    """Run an ordinary forward and backward pass."""
    model.zero_grad(set_to_none=True)
    outputs = output.read(batch.given_to(model))
    torch.vmap(output.value)(outputs, batch.labels).sum().backward()
    model.zero_grad(set_to_none=True)


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


def seconds_of(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    *,
    by_clock: bool = False,
) -> dict[str, list[float]]:
    """Return the times of each side over the rounds; in a round, all sides run in turn."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, call in sides.items():
            start = seconds_now(device, by_clock=by_clock)
            call()
            seconds[side].append(seconds_now(device, by_clock=by_clock) - start)
    return {side: taken[1:] for side, taken in seconds.items()}


def _peak_kib() -> int:
    """Return the peak memory of this process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def print_peak(call: Callable[[], object]) -> None:
    """Print the KiB that a call adds at its peak; ``measured`` reads them in another process."""
    ctypes.CDLL(None).malloc_trim(0)  # what setting up freed
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # and the peak so far
    before = _peak_kib()
    call()
    print("peak", _peak_kib() - before)


def peak_on_gpu(call: Callable[[], object]) -> int:
    """Return the bytes that a call adds to torch's allocated GPU memory at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def measured(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    n_samples: int,
    row: Callable[..., Row],
    arguments: Sequence[str] | None,
    device: str = "cpu",
) -> Iterator[Row]:
    """Time the sides, then print and yield a row for each of them.

    Args:
        sides: The functions to measure, by name, including the floor.
        rounds: The number of timed rounds.
        n_samples: The number of samples in the batch of each call.
        row: A ``Row`` in which the measured values are not set.
        arguments: Arguments of the calling script that select this model. ``--peak SIDE`` is added
            to them. None means that memory is not measured.
        device: The device of the computation.
    """
    seconds = seconds_of(sides, rounds, device)
    unit = statistics.median(seconds[FLOOR])
    for side, taken in seconds.items():
        output = "nan"
        if device == "cuda":
            output = str(peak_on_gpu(sides[side]) / 1024)
        elif arguments is not None:
            command = [sys.executable, sys.argv[0], *arguments, "--peak", side]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = row(
            side=side,
            ms_a_sample=1000 * statistics.median(taken) / n_samples,
            floors=statistics.median(taken) / unit,
            least=min(taken) / unit,
            greatest=max(taken) / unit,
            mb_a_sample=float(output.split()[-1]) * 1024 / 1e6 / n_samples,
        )
        print(found, flush=True)
        yield found


TOKENS = 128
# Width, layers, heads, vocabulary, samples a batch.
SIZES = {"7M": (256, 6, 4, 8192, 8), "30M": (512, 8, 8, 8192, 4), "124M": (768, 12, 12, 50257, 2)}
# Width, inner width, layers, heads, heads of keys, vocabulary, samples a batch.
LLAMAS = {
    "llama_2M": (128, 352, 4, 4, 2, 4000, 4),
    "llama_8M": (288, 768, 6, 6, 2, 4000, 4),
    "llama": (384, 1024, 8, 6, 2, 16384, 4),
    "103M": (768, 2048, 12, 12, 12, 12000, 1),
}
# Width, layers, vocabulary, samples a batch.
LSTMS = {
    "lstm_100k": (64, 1, 500, 4),
    "lstm_2M": (256, 2, 2000, 4),
    "lstm_6M": (512, 2, 2000, 4),
    "lstm_21M": (1024, 2, 2000, 4),
}
# Classes of transformers, with vocabulary, samples a batch, and settings.
OTHERS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        *(1000, 4),
        {
            **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None},
        },
    ),
    "xlnet": ("XLNetLMHeadModel", 500, 4, {"d_model": 64, "n_layer": 2, "n_head": 4}),
    **{
        name: (
            "BigBirdForMaskedLM",
            *(500, 4),
            {
                **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"intermediate_size": 128, "attention_type": kind, "block_size": 16},
                **{"num_random_blocks": 2, "max_position_embeddings": 512},
            },
        )
        for name, kind in {"big_bird": "original_full", "big_bird_sparse": "block_sparse"}.items()
    },
}


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


def language_model(
    name: str, n_samples: int | None = None, n_tokens: int = TOKENS
) -> tuple[nn.Module, Tensor]:
    """Return a model with random weights and a batch of tokens, shape (samples, n_tokens).

    Args:
        name: A key of one of the tables above.
        n_samples: Texts in the batch; None for the model's default.
        n_tokens: At most ``TOKENS`` for GPT-2 and Llama.
    """
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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
    elif name in OTHERS:
        kind, vocabulary, usual, settings = OTHERS[name]
        made = getattr(transformers, kind)
        model = made(made.config_class(vocab_size=vocabulary, **settings))
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

"""Compute scores of the board's questions with other packages, each in its own environment.

    PYTHONPATH=. /tmp/peers/kronfluence/bin/python benchmarks/board_rivals.py kronfluence --folder f

Each package has its own environment in /tmp/peers, for Python 3.11:

    for peer in kronfluence bergson dattri logix; do
      python3 -m venv $peer
      $peer/bin/python -m pip install torch==2.13.0+cpu transformers==5.23.0
    done
    kronfluence/bin/python -m pip install kronfluence==1.0.1
    bergson/bin/python -m pip install bergson==2.5.1
    bergson/bin/python -m pip uninstall --yes torchvision torchaudio
    dattri/bin/python -m pip install dattri==0.3.0
    logix/bin/python -m pip install einops pyyaml tqdm
    logix/bin/python -m pip install --no-deps --ignore-requires-python logix-ai==0.1.1

bergson requires torchvision and torchaudio. PyPI's builds of both are for CUDA, and with a CPU
build of torch they break the import of transformers. LogIX's metadata excludes Python 3.11, but its
code works. dattri calls ``torch.compile``, which needs a C++ compiler.

Each package gets the end of run 0 and all training pieces. GPT-2's ``Conv1D`` is rewritten as
``nn.Linear``, except for bergson. Only attention and MLPs are used, as in the packages' examples.
All other settings are defaults. Scores are written to files in the folder, with the package's
version.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import torch
from board_study import Board, board_in, losses, make_model, save, written
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.pytorch_utils import Conv1D

_CHUNK, _SIDE = 50, 16
Scores = dict[str, np.ndarray]


def _model(about: Board, folder: Path) -> Any:
    model = make_model(about.size).eval()
    state = torch.load(folder / "run-0.pt")[1.0]["state"]
    model.load_state_dict(state, strict=False)
    return model


def _linear(about: Board, folder: Path) -> tuple[Any, list[str]]:
    """Return the model with ``nn.Linear`` layers, and the names of the layers that are used."""
    model = _model(about, folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Conv1D)}
    for name, old in layers.items():
        inputs, outputs = old.weight.shape
        new = nn.Linear(inputs, outputs)
        new.weight.data, new.bias.data = old.weight.data.T.contiguous(), old.bias.data
        model.set_submodule(name, new)
    return model.eval(), [*layers]


def kronfluence(about: Board, folder: Path, work: Path) -> Scores:
    """Return EK-FAC's scores, with its default damping and a tenth of the mean eigenvalue."""
    package = importlib.import_module("kronfluence.analyzer")
    arguments = importlib.import_module("kronfluence.arguments")
    model, names = _linear(about, folder)

    class LanguageModelling(importlib.import_module("kronfluence.task").Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            tokens = batch[0]
            if not sample:
                return losses(model, tokens).sum()
            logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
            with torch.no_grad():
                drawn = torch.multinomial(logits.softmax(dim=-1), 1).flatten()
            return nn.functional.cross_entropy(logits, drawn, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return losses(model, batch[0]).sum()

        def get_influence_tracked_modules(self) -> list[str]:
            return names

        def get_attention_mask(self, batch: Any) -> None:
            return None

    task = LanguageModelling()
    model = package.prepare_model(model, task)
    analyzer = package.Analyzer(
        "board", model, task, cpu=True, disable_tqdm=True, output_dir=str(work)
    )
    train, asked = TensorDataset(about.train), TensorDataset(about.asked)
    torch.manual_seed(0)
    analyzer.fit_all_factors(
        "ekfac",
        train,
        per_device_batch_size=_CHUNK,
        factor_args=arguments.FactorArguments(strategy="ekfac"),
    )
    found = {}
    for name, damping in (("EK-FAC, damping 1e-8 (its default)", 1e-8), ("EK-FAC", None)):
        label = "scores" if damping else "heuristic"
        made = analyzer.compute_pairwise_scores(
            label,
            "ekfac",
            asked,
            train,
            per_device_query_batch_size=10,
            per_device_train_batch_size=_CHUNK,
            score_args=arguments.ScoreArguments(damping_factor=damping),
        ) or analyzer.load_pairwise_scores(label)
        full = name if damping else "EK-FAC, damping a tenth of the mean eigenvalue"
        found[full] = made["all_modules"].float().numpy().T
    return found


def dattri(about: Board, folder: Path, work: Path) -> Scores:
    """Return LoGra's scores, with 16 x 16 numbers for each layer."""
    algorithm = importlib.import_module("dattri.algorithm.logra")
    tasks = importlib.import_module("dattri.task")
    model, names = _linear(about, folder)

    def loss(model: nn.Module, batch: Any, device: str) -> Tensor:
        return losses(model, batch["input_ids"].to(device)).mean()

    def batches(tokens: Tensor) -> DataLoader[Any]:
        rows: Any = [{"input_ids": one, "labels": one} for one in tokens]
        return DataLoader(rows, batch_size=_CHUNK)

    found = {}
    for damping in (None, 0.1):
        task = tasks.AttributionTask(
            loss_func=loss, model=model, checkpoints=model.state_dict(), target_func=loss
        )
        made = algorithm.LoGraAttributor(
            task, layer_names=names, damping=damping, proj_dim=_SIDE**2, cache_dir=str(work)
        )
        made.cache(batches(about.train))
        scores = made.attribute(batches(about.train), batches(about.asked))
        own = "its default damping" if damping is None else f"damping {damping:g}"
        found[f"LoGra 16 x 16, {own}"] = scores.float().numpy()
    return found


def logix(about: Board, folder: Path, work: Path) -> Scores:
    """Return LoGra's scores with random matrices, with 16 x 16 numbers for each layer."""
    package = importlib.import_module("logix")
    model, _ = _linear(about, folder)
    config = work / "config.yaml"
    config.write_text(f"root_dir: {work}\nlora:\n  init: random\n  rank: {_SIDE}\n")
    run = package.LogIX(project="board", config=str(config))
    run.watch(model.transformer, name_filter=["attn", "mlp"])
    run.add_lora()
    run.setup({"grad": ["log", "covariance"]})

    def log(tokens: Tensor, first: int) -> None:
        with run(data_id=[str(first + i) for i in range(len(tokens))]):
            model.zero_grad()
            losses(model, tokens).sum().backward()

    run.save(enable=True)
    for i in range(0, len(about.train), _CHUNK):
        log(about.train[i : i + _CHUNK], i)
    run.finalize()
    loader = run.build_log_dataloader(batch_size=_CHUNK)
    run.eval()
    log(about.asked, 0)
    made = run.compute_influence_all(run.get_log(copy=True), loader)
    order = np.argsort([int(i) for i in made["tgt_ids"]])
    return {"LoGra 16 x 16": made["influence"].float().numpy()[:, order].T}


def bergson(about: Board, folder: Path, work: Path) -> Scores:
    """Return EK-FAC's and TrackStar's scores, which bergson's commands write to files."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    place = work / "model"
    model = _model(about, folder)
    # bergson's batch size is in tokens, and must not exceed the number of positions of the model.
    positions = nn.Embedding(2048, about.size.width)
    positions.weight.data[: about.size.length] = model.transformer.wpe.weight.data
    model.transformer.wpe, model.config.n_positions = positions, 2048
    model.save_pretrained(place)
    words = {f"w{i}": i for i in range(about.size.words)} | {"[END]": about.size.words}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", eos_token="w0"
    ).save_pretrained(place)
    for split, tokens in (("train", about.train), ("asked", about.asked)):
        lines = [{"text": " ".join(f"w{i}" for i in one)} for one in tokens.tolist()]
        text = "\n".join(json.dumps(line) for line in lines)
        (work / f"{split}.jsonl").write_text(text + "\n")
    program = str(Path(sys.executable).with_name("bergson"))
    common = ["--model", str(place), "--data.dataset", str(work / "train.jsonl")]
    common += ["--query.dataset", str(work / "asked.jsonl"), "--query.aggregation", "none"]
    found = {}
    for name, words_of in {
        "EK-FAC": ["ekfac", "--method", "kfac", "--hessian_cfg.ev_correction", "true"],
        "TrackStar, p = 16": ["trackstar"],
    }.items():
        run = work / name.replace(" ", "-")
        if not (run / "scores").exists():
            command = [program, words_of[0], str(run), *common, *words_of[1:], "--overwrite"]
            done = subprocess.run(command, check=False)
            if done.returncode:
                print(f"{name}: bergson ended with {done.returncode}", file=sys.stderr)
                continue
        data = importlib.import_module("bergson.data")
        found[name] = np.asarray(data.load_scores(run / "scores")[:])
    return found


RIVALS: dict[str, Callable[[Board, Path, Path], Scores]] = {
    "kronfluence": kronfluence,
    "bergson": bergson,
    "dattri": dattri,
    "logix": logix,
}


def main() -> None:
    """Write one package's scores into the board's folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("rival", choices=RIVALS)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = board_in(asked.folder)
    work = asked.folder.resolve() / f"work-{asked.rival}"
    work.mkdir(exist_ok=True)
    scores = RIVALS[asked.rival](about, asked.folder.resolve(), work)
    version = metadata.version("logix-ai" if asked.rival == "logix" else asked.rival)
    named = {f"{asked.rival} {version}, {name}": values for name, values in scores.items()}
    written(asked.folder / f"rival-{asked.rival}.npz", lambda path: save(path, named))


if __name__ == "__main__":
    main()

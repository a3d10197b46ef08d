"""Time a whole study from checkpoints to a file of scores: the pipeline, compat, and traker.

    python benchmarks/study.py --csv study.csv

The study has ten checkpoints of the default study's network, 1,200 training samples, the hundred
targets of its experiment `sample`, and k = 512. Each side is a process with all of its imports:
TRAK's package (`traker`, with its BasicProjector), the same script with `trak_core.compat`, and
`trak run`. TRAK's package recomputes its projection matrix for every batch. Therefore the scripts
run with the pipeline's batch size of 64 and with the batch size that is fastest for TRAK's package
(of 64, 200, 400 and 1,200).

Sides run in turn on two cores. The table has medians of wall and CPU seconds over the rounds, with
the smallest and largest. CPU seconds depend less on other programs. Ratios are relative to traker
with the same batch size, and for the pipeline to the faster of both.
"""

import argparse
import importlib
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from shared import environment, run, write_csv
from torch import Tensor

_REPOSITORY = Path(__file__).parents[1]
_CORES = 2
_STUDY = _REPOSITORY / "config/digits.py"
_CHECKPOINTS, _PROJ_DIM, _BATCHES = 10, 512, (64, 1200)
_PACKAGES = {"traker": "trak", "compat": "trak_core.compat"}


@dataclass(frozen=True)
class Row:
    """The time of one side."""

    side: str
    batch: int | None
    seconds: float
    least: float
    greatest: float
    ratio: float
    processor: float
    processor_ratio: float


def _targets() -> list[int]:
    table = (_REPOSITORY / "config/sample.tsv").read_text(encoding="utf-8")
    return [int(line) for line in table.split()[1:]]


def _prepare(folder: Path) -> None:
    """Train the checkpoints and write the config."""
    from trak_core.study.study import Study, trained_model

    study = Study.load(_STUDY)
    for i in range(_CHECKPOINTS):
        model = trained_model(study, {"seed": i, "epochs": 15})
        torch.save(model.state_dict(), folder / f"c{i}.pt")
    config = {
        "study": str(_STUDY),
        "model_output": "image_classification",
        "checkpoints": {f"c{i}": f"c{i}.pt" for i in range(_CHECKPOINTS)},
        "experiments": {"all": {"targets": _targets()}},
        "projection": {"proj_dim": _PROJ_DIM},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def _score(package: str, batch: int, folder: Path) -> None:
    """Featurize and score with TRAK's interface, and write the scores to ``folder``."""
    from trak_core.study.study import Study

    torch.set_num_threads(_CORES)
    trak, study = importlib.import_module(package), Study.load(_STUDY)
    targets = study.split("all", _targets())
    splits = {"train": study.split("train", None), "targets": targets}

    def batches(split: str) -> list[tuple[Tensor, ...]]:
        n = len(splits[split].ids)
        found = []
        for start in range(0, n, batch):
            samples = splits[split].batch(start, min(start + batch, n))
            assert isinstance(samples, tuple)
            found.append(samples)
        return found

    model = study.make_model().eval()
    tracer = trak.TRAKer(
        model=model,
        task="image_classification",
        train_set_size=len(splits["train"].ids),
        save_dir=folder / package,
        device="cpu",
        proj_dim=_PROJ_DIM,
        use_half_precision=False,
    )
    states = [torch.load(folder / f"c{i}.pt") for i in range(_CHECKPOINTS)]
    for i, state in enumerate(states):
        tracer.load_checkpoint(state, model_id=i)
        for samples in batches("train"):
            tracer.featurize(samples, num_samples=len(samples[0]))
    tracer.finalize_features()
    for i, state in enumerate(states):
        tracer.start_scoring_checkpoint("all", state, i, num_targets=len(targets.ids))
        for samples in batches("targets"):
            tracer.score(samples, num_samples=len(samples[0]))
    tracer.finalize_scores("all")


def _seconds(side: str, batch: int | None, folder: Path) -> tuple[float, float]:
    """Run one side from the beginning; return its wall seconds and CPU seconds."""
    for results in ("results", *_PACKAGES.values()):
        shutil.rmtree(folder / results, ignore_errors=True)
    command = [sys.executable, __file__, "--side", side, "--batch", str(batch)]
    command += ["--folder", str(folder)]
    if side == "pipeline":
        command = [str(Path(sys.executable).with_name("trak")), "run", "study.yaml", "scores"]
        command += ["--cores", str(_CORES)]
    used = run(command, folder, folder / "log.txt")
    return used.wall, used.seconds


def main() -> None:
    """Run all sides of the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--side", choices=_PACKAGES, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        _score(_PACKAGES[asked.side], asked.batch, asked.folder)
        return
    os.environ |= {"PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": str(_CORES)}
    about = environment("cpu", ("torch", "numpy", "numba", "snakemake", "traker"))
    print(about)
    print("| side | batch | seconds | over traker | processor s | over traker |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder)
        sides = [(side, batch) for batch in _BATCHES for side in _PACKAGES]
        taken: dict[tuple[str, int | None], list[tuple[float, float]]]
        taken = {side: [] for side in [*sides, ("pipeline", None)]}
        for _ in range(asked.rounds):
            for (side, batch), seconds in taken.items():
                seconds.append(_seconds(side, batch, folder))
    medians = {
        side: tuple(statistics.median(values) for values in zip(*both, strict=True))
        for side, both in taken.items()
    }
    rows = []
    for (side, batch), both in taken.items():
        peers = _BATCHES if batch is None else (batch,)
        own, seconds = medians[side, batch], [wall for wall, _ in both]
        ratios = [own[i] / min(medians["traker", one][i] for one in peers) for i in (0, 1)]
        row = Row(side, batch, own[0], min(seconds), max(seconds), ratios[0], own[1], ratios[1])
        rows.append(row)
        print(
            f"| {side} | {batch or ''} | {row.seconds:.1f} [{row.least:.1f}-{row.greatest:.1f}] | "
            f"{row.ratio:.2f} | {row.processor:.1f} | {row.processor_ratio:.2f} |"
        )
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

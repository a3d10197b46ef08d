"""Whole studies, from the same checkpoints to a file of scores: the pipeline, compat, and traker.

    python benchmarks/study.py digits resnet --csv study.csv

`digits`: ten checkpoints of the default study's network, 1,200 training samples, a hundred
targets, those of its experiment `sample`, k = 512. `resnet`: two of a ResNet with BatchNorm
(308,266 parameters, random weights), 2,000 images of noise of 3 x 32 x 32, a hundred targets, k =
2,048. Each side is a process of its own with all of its imports: TRAK's package (`traker`, by its
BasicProjector), the same script by `trak_core.compat`, and `snakemake scores`. TRAK's package makes
its matrix anew for every batch: the scripts run with the pipeline's batch of 64, and with the one
that TRAK's package was fastest with (`digits`: of 64, 200, 400 and 1,200; `resnet`: of 64, 128,
256, 500 and 1,000). Two cores are used by all; the sides take turns, and the medians of the rounds
count, with the least and the greatest; so do those of the processors' seconds, which depend less on
what else runs. Ratios are over traker with the same batch, the pipeline's over the faster traker.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from machine import environment, write_csv
from torch import Tensor

_REPOSITORY = Path(__file__).parents[1]
_CORES = 2
_PR_SET_CHILD_SUBREAPER = 36
_NOISE = """
import sys
sys.path[:0] = [{benchmarks!r}]
import torch
from large_models import resnet as make_model
from torch.utils.data import TensorDataset


def _noise(n, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(10, (n,), generator=generator))


def train_data():
    return _noise(2000, 0)


def target_data():
    return _noise(100, 1)
"""


@dataclass(frozen=True)
class Case:
    """A study.

    Attributes:
        n_checkpoints: How many.
        proj_dim: k.
        batches: Samples at once of the scripts: a small number, and traker's fastest.
    """

    n_checkpoints: int
    proj_dim: int
    batches: tuple[int, int]


_CASES = {"digits": Case(10, 512, (64, 1200)), "resnet": Case(2, 2048, (64, 500))}
_SIDES = {"traker": "trak", "compat": "trak_core.compat", "pipeline": ""}


@dataclass(frozen=True)
class Row:
    """What one side of a case took."""

    case: str
    side: str
    batch: int | None
    seconds: float
    least: float
    greatest: float
    ratio: float
    processor: float
    processor_ratio: float


def _study(case: str, folder: Path) -> Path:
    if case == "digits":
        return _REPOSITORY / "config/digits.py"
    path = folder / "noise.py"
    path.write_text(_NOISE.format(benchmarks=str(Path(__file__).parent)), encoding="utf-8")
    return path


def _targets() -> list[int]:
    table = (_REPOSITORY / "config/sample.tsv").read_text(encoding="utf-8")
    return [int(line) for line in table.split()[1:]]


def _prepare(case: str, folder: Path) -> None:
    """Make the checkpoints and the config."""
    from trak_core.study.study import Study, trained_model

    study, asked = Study.load(_study(case, folder)), _CASES[case]
    for i in range(asked.n_checkpoints):
        torch.manual_seed(i)
        trained = case == "digits"
        model = trained_model(study, {"seed": i, "epochs": 15}) if trained else study.make_model()
        torch.save(model.state_dict(), folder / f"c{i}.pt")
    config = {
        "study": str(_study(case, folder)),
        "model_output": "image_classification",
        "checkpoints": {f"c{i}": f"c{i}.pt" for i in range(asked.n_checkpoints)},
        "experiments": {"all": {"targets": _targets() if case == "digits" else [*range(100)]}},
        "projection": {"proj_dim": asked.proj_dim},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def _score(case: str, package: str, batch: int, folder: Path) -> None:
    """Featurize and score by TRAK's interface, and leave the scores in ``folder``."""
    from trak_core.study.study import Study

    torch.set_num_threads(_CORES)
    trak, asked = importlib.import_module(package), _CASES[case]
    study = Study.load(_study(case, folder))
    targets = study.split("all", _targets() if case == "digits" else None)
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
        proj_dim=asked.proj_dim,
        use_half_precision=False,
    )
    states = [torch.load(folder / f"c{i}.pt") for i in range(asked.n_checkpoints)]
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


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(case: str, side: str, batch: int | None, folder: Path) -> tuple[float, float]:
    """Run one side to its end, from nothing; return its seconds, and those of the processors."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    shutil.rmtree(folder / _SIDES[side], ignore_errors=True) if _SIDES[side] else None
    if side == "pipeline":
        command = [str(Path(sys.executable).with_name("snakemake")), "scores"]
        command += ["--cores", str(_CORES), "--configfile", "study.yaml"]
        command += ["--snakefile", str(_REPOSITORY / "Snakefile")]
    else:
        command = [sys.executable, __file__, case, "--side", side, "--batch", str(batch)]
        command += ["--folder", str(folder)]
    began, used = time.perf_counter(), _processor_seconds()
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": str(_CORES)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    # The process that forks for jobs ends after Snakemake.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return time.perf_counter() - began, _processor_seconds() - used


def main() -> None:
    """Run all sides of the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="+", choices=_CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    parser.add_argument("--side", choices=["traker", "compat"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        _score(asked.cases[0], _SIDES[asked.side], asked.batch, asked.folder)
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whose seconds count here then
    about = environment("cpu", ("torch", "numpy", "numba", "snakemake", "traker"))
    print(about)
    print("| study | side | batch | seconds | over traker | processor s | over traker |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for case in asked.cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _prepare(case, folder)
            small, large = _CASES[case].batches
            scripts = [(side, batch) for batch in (small, large) for side in ("traker", "compat")]
            runs: list[tuple[str, int | None]] = [*scripts, ("pipeline", None)]
            taken: dict[tuple[str, int | None], list[tuple[float, float]]]
            taken = {run: [] for run in runs}
            for _ in range(asked.rounds):
                for (side, batch), seconds in taken.items():
                    seconds.append(_seconds(case, side, batch, folder))
        medians = {
            run: tuple(statistics.median(values) for values in zip(*both, strict=True))
            for run, both in taken.items()
        }
        for (side, batch), both in taken.items():
            peers = (small, large) if batch is None else (batch,)
            own, seconds = medians[side, batch], [wall for wall, _ in both]
            ratios = [own[i] / min(medians["traker", one][i] for one in peers) for i in (0, 1)]
            ends = min(seconds), max(seconds)
            row = Row(case, side, batch, own[0], *ends, ratios[0], own[1], ratios[1])
            rows.append(row)
            print(
                f"| {case} | {side} | {batch or ''} | {row.seconds:.1f} [{row.least:.1f}-"
                f"{row.greatest:.1f}] | {row.ratio:.2f} | {row.processor:.1f} | "
                f"{row.processor_ratio:.2f} |",
                flush=True,
            )
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

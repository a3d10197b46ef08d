"""LDS of scores from ends of runs and from along them: which checkpoints to save and take.

    python benchmarks/which_checkpoints.py config/digits.py --csv which.csv
    python benchmarks/which_checkpoints.py benchmarks/digits_batch_norm.py --csv batch_norm.csv

Trains ten networks of the study, which leave a checkpoint after every epoch named below, and two on
each of a hundred random halves, by the default study's own draws. Features (`rademacher`, k =
1,024) and scores are the library's, with damping 2; the targets are the default study's `sample`.
Each row is a choice of checkpoints: its LDS, with a 95 % bootstrap interval over halves and
targets, and how far it is above the ends of the ten runs, scored by their own defaults, with a
paired interval of the same draws. Pairs and quadruples of times, the same for all runs, are tried
on every other target, and the best is reported on the rest beside what it was chosen by.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch
import yaml
from machine import environment, write_csv

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.config.read_config import target_ids
from trak_core.dependency_digests import content_digest
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import GroundTruth, bootstrap, rank_correlations
from trak_core.evaluation.subset_sums import CheckpointRows, average_weights, setting_sums
from trak_core.spec import Combine, FeaturesSpec, RetrainedSpec, Setting
from trak_core.stages.compute_features import compute_features
from trak_core.stages.evaluate_scores import read_ground_truth
from trak_core.stages.retrain import retrain
from trak_core.stages.train_checkpoint import train_checkpoint

_REPOSITORY = Path(__file__).parents[1]
_CONFIG = yaml.safe_load((_REPOSITORY / "config/config.yaml").read_text(encoding="utf-8"))
_TARGETS = target_ids(str(_REPOSITORY / _CONFIG["experiments"]["sample"]["targets"])) or []
_EPOCHS, _RUNS, _HALVES, _K = 15, 10, 100, 1024
_TIMES = (1, 2, 3, 4, 5, 7, 10, 15)
# The defaults of checkpoints from along runs, and of ends of runs.
_ALONG = Setting(2, 0.75, Combine.UNIT_AVERAGE, _K)
_ENDS = Setting(2, 0.5, Combine.PRODUCT_OF_AVERAGES, _K)
Chosen = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Row:
    """A choice of checkpoints."""

    checkpoints: str
    lds: float
    low: float
    high: float
    above: float
    above_low: float
    above_high: float


def _features_spec(checkpoint: str, split: str) -> FeaturesSpec:
    return FeaturesSpec(
        model_output=_CONFIG["model_output"],
        parameter_patterns=None,
        projection={"kind": "rademacher", "proj_dim": _K, "seed": 0},
        dtype="float32",
        study_digest="",
        checkpoint=checkpoint,
        split=split,
        targets_digest=None if split == "train" else content_digest(_TARGETS),
    )


def _make_features(study: Path, folder: Path) -> None:
    """Train the runs and project the gradients of both splits at all times."""
    for run in range(_RUNS):
        names = [f"{run}-{at}" for at in _TIMES]
        paths = [folder / f"{name}.pt" for name in names]
        arguments = {"epochs": _EPOCHS, "seed": run}
        times: list[float] = [*_TIMES]
        train_checkpoint(
            checkpoints=paths, study_file=study, arguments=arguments, times=times, threads=1
        )
        for name, path in zip(names, paths, strict=True):
            for split in ("train", "sample"):
                compute_features(
                    features=folder / f"{name}-{split}.h5",
                    checkpoint=path,
                    study_file=study,
                    spec=_features_spec(name, split),
                    targets=None if split == "train" else _TARGETS,
                    code="",
                    device="cpu",
                    batch_size=400,
                    memory_mb=1000,
                    threads=1,
                )


def _retrain(study: Path, folder: Path) -> GroundTruth:
    """Train on halves, and return which and what they say of the targets."""
    spec = RetrainedSpec(
        subsets="random",
        arguments={"epochs": _EPOCHS},
        model_output=_CONFIG["model_output"],
        study_digest="",
        seeds=2,
        seed=0,
    )
    path = folder / "halves.h5"
    retrain(
        retrained=path,
        study_file=study,
        spec=spec,
        first=0,
        last=_HALVES - 1,
        code="",
        batch_size=400,
        threads=1,
    )
    with open_artifact(folder / f"0-{_EPOCHS}-train.h5", FEATURES) as file:
        train_ids = file.ids("sample_ids")
    return read_ground_truth([path], train_ids, _TARGETS, spec)


class _Sums:
    """Subset sums of the checkpoints' scores."""

    def __init__(self, folder: Path, masks: np.ndarray):
        """Read what every checkpoint says of its training samples."""
        self._folder, self._masks = folder, masks
        everything = [(run, at) for run in range(_RUNS) for at in _TIMES]
        self._weights: dict[tuple[int, int], np.ndarray] = {}
        self._curvature: dict[tuple[int, int], np.ndarray] = {}
        for run, at in everything:
            with open_artifact(folder / f"{run}-{at}-train.h5", FEATURES) as file:
                self._weights[run, at] = file.vector("loss_weights")
                self._curvature[run, at] = file.vector("curvature").astype(float)
        self._along = {one: self._share(*one, _ALONG, [one]) for one in everything}

    def _share(self, run: int, at: int, setting: Setting, averaged: Chosen) -> np.ndarray:
        weights = average_weights([setting], [self._weights[one] for one in averaged])
        diagonal = np.ones(self._masks.shape[1])
        if setting is _ALONG:
            diagonal = self._curvature[run, at] ** setting.loss_weight_power
        name = self._folder / f"{run}-{at}"
        with (
            open_artifact(Path(f"{name}-train.h5"), FEATURES) as train,
            open_artifact(Path(f"{name}-sample.h5"), FEATURES) as targets,
        ):
            rows = train.matrix("features")[:]
            checkpoint = CheckpointRows(
                loss_weights=self._weights[run, at],
                normal_weights={setting.loss_weight_power: diagonal},
                read=lambda start, stop: rows[start:stop],
                target_features=targets.matrix("features")[:].astype(float),
                block=len(rows),
            )
        return setting_sums(self._masks, [setting], weights, checkpoint)[setting]

    def along(self, chosen: Chosen) -> np.ndarray:
        """Return the sums of checkpoints from along runs, by their defaults."""
        return np.sum([self._along[one] for one in chosen], axis=0)

    def ends(self, chosen: Chosen) -> np.ndarray:
        """Return the sums of ends of runs, by theirs."""
        return np.sum([self._share(*one, _ENDS, chosen) for one in chosen], axis=0)


def _same(runs: int, times: Sequence[int]) -> Chosen:
    return [(run, at) for run in range(runs) for at in times]


def _staggered(each: int) -> Chosen:
    """Return times that take turns: run r has the r-th, and others evenly away from it."""
    own = sorted([*_TIMES, *_TIMES[2:4]])[:_RUNS]
    return sorted({
        (run, own[(run + turn * len(own) // each) % len(own)])
        for run in range(_RUNS)
        for turn in range(each)
    })


def _choices(sums: _Sums) -> dict[str, np.ndarray]:
    """Return the rows of the table."""
    last = _EPOCHS
    along: Mapping[str, Chosen] = {
        "ten runs, their ends, combined as along runs": _same(10, [last]),
        "ten runs, one time each, taking turns": _staggered(1),
        "ten runs, two times each, taking turns": _staggered(2),
        "ten runs, all at 1 and 15": _same(10, [1, last]),
        "ten runs, all at 2 and 15": _same(10, [2, last]),
        "ten runs, all at 3 and 15": _same(10, [3, last]),
        "ten runs, all at 1, 3, 7, 15": _same(10, [1, 3, 7, last]),
        "ten runs, at all eight times": _same(10, _TIMES),
        "ten runs, early only: 1, 2": _same(10, [1, 2]),
        "ten runs, late only: 10, 15": _same(10, [10, last]),
        "three runs, all at 3 and 15": _same(3, [3, last]),
        "three runs, at all eight times": _same(3, _TIMES),
        "one run, at 3 and 15": _same(1, [3, last]),
        "one run, at 1, 3, 7, 15": _same(1, [1, 3, 7, last]),
        "one run, at all eight times": _same(1, _TIMES),
    }
    rows = {
        "ten runs, their ends": sums.ends(_same(10, [last])),
        "three runs, their ends": sums.ends(_same(3, [last])),
        "one run, its end": sums.ends(_same(1, [last])),
    }
    return rows | {name: sums.along(chosen) for name, chosen in along.items()}


def main() -> None:
    """Measure every choice on the same retrained halves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("study", type=Path, help="a study whose train() yields after every epoch")
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_features(asked.study, folder)
        truth = _retrain(asked.study, folder)
        sums = _Sums(folder, truth.masks)
        rows = _choices(sums)
    drawn = bootstrap([*rows.values()], truth.outputs)
    mean = truth.outputs.mean(axis=0)
    about = environment("cpu", ("torch", "numpy", "trak-core"))
    print(about)
    table = []
    intervals = zip(
        np.transpose(interval(drawn, axis=0)),
        np.transpose(interval(drawn - drawn[:, :1], axis=0)),
        strict=True,
    )
    # The noise ceiling comes last.
    for (name, found), (own, gain) in zip(rows.items(), intervals, strict=False):
        lds = rank_correlations(found, mean).mean()
        above = lds - rank_correlations(rows["ten runs, their ends"], mean).mean()
        table.append(Row(name, *(round(float(x), 4) for x in (lds, *own, above, *gain))))
    print(("{:<48}" + "{:>11}" * 6).format(*asdict(table[0])))
    for row in table:
        print(("{:<48}" + "{:>11.3f}" * 6).format(*asdict(row).values()))
    ceiling = np.transpose(interval(drawn, axis=0))[-1]
    print(f"noise ceiling: {ceiling[0]:.3f} to {ceiling[1]:.3f}")
    for size, keeps_end in product((2, 4), (True, False)):
        choices = [t for t in combinations(_TIMES, size) if _EPOCHS in t or not keeps_end]
        each = [rank_correlations(sums.along(_same(10, times)), mean) for times in choices]
        best = int(np.argmax([found[::2].mean() for found in each]))
        kept = ", the end among them" if keeps_end else ""
        print(
            f"best {size} times for all runs{kept}, on every other target: {choices[best]}, LDS "
            f"{each[best][::2].mean():.3f}; on the rest {each[best][1::2].mean():.3f}"
        )
    if asked.csv is not None:
        write_csv(asked.csv, table, about)


if __name__ == "__main__":
    main()

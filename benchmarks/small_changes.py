"""Measure the LDS for large and small changes to the training set, by damping and checkpoints.

    python benchmarks/small_changes.py digits_mlp breast_cancer diabetes --csv small.csv

Each study trains five networks with several checkpoints each. Two of these runs are repeated on
random subsets, with weight 0 for all other samples. Features (`rademacher`, k = 512) and scores are
computed by the library.

A row has the fraction of samples kept, a choice of checkpoints, the number of drawn labels
(`label_draws`), a damping, and the LDS with a 95 % bootstrap interval over subsets and targets.
Differences are paired, and relative to the same checkpoints without drawn labels and with damping
2, or to `early and end` if `--draws` has only one number. The line before a study's table shows how
closely its networks fit the data at each time: the mean loss weight, and the effective fraction of
samples with a loss weight (the square of the sum of loss weights over n times the sum of their
squares). `--folder` keeps the trained models, so that an interrupted run can continue.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from shared import environment, write_csv

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution.sample_outputs import outputs_and_predictions
from trak_core.config.scoring_settings import usual_power, usual_weighting
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import GroundTruth, bootstrap, rank_correlations
from trak_core.evaluation.subset_sums import CheckpointRows, average_weights, setting_sums
from trak_core.model_outputs.about_outputs import about_output
from trak_core.settings import Combine, FeaturesSpec, Setting, curvature_power, subset_size
from trak_core.stages.compute_features import compute_features
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.retraining_draws import random_subset
from trak_core.study.study import Study, trained_model

_STUDIES = Path(__file__).parent / "studies"
_RUNS, _K, _SEEDS = 5, 512, 2
_DAMPINGS = 0.1, 0.3, 1, 2, 5, 10
_FRACTIONS = 0.5, 0.9, 0.99


@dataclass(frozen=True)
class Case:
    """A study: its file, its model output, and its epochs."""

    path: Path
    model_output: str
    epochs: int
    subsets: int
    n_targets: int = 100

    @property
    def times(self) -> list[float]:
        """The epochs with a checkpoint, in increasing order up to the end."""
        parts = 1 / 15, 1 / 5, 1 / 3, 2 / 3, 1
        return sorted({max(1, round(self.epochs * part)) for part in parts})


_IMAGES = "image_classification"
CASES = {
    "digits_mlp": Case(_STUDIES / "digits_mlp.py", _IMAGES, 15, 60),
    "digits_mlp_long": Case(_STUDIES / "digits_mlp.py", _IMAGES, 60, 60),
    "breast_cancer": Case(_STUDIES / "breast_cancer.py", _IMAGES, 15, 60),
    "breast_cancer_long": Case(_STUDIES / "breast_cancer.py", _IMAGES, 60, 60),
    "diabetes": Case(_STUDIES / "diabetes.py", "regression", 15, 60),
    "diabetes_long": Case(_STUDIES / "diabetes.py", "regression", 60, 60),
}
Chosen = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Row:
    """A choice of checkpoints and damping, measured on subsets of one fraction."""

    study: str
    keeps: float
    checkpoints: str
    draws: int
    damping: float
    lds: float
    low: float
    high: float
    above: float
    above_low: float
    above_high: float


class Measured:
    """One study's checkpoints and retrained models."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        runs: int = _RUNS,
        draws: Sequence[int] = (0,),
        only: Sequence[str] = (),
    ) -> None:
        """Train ``runs`` networks that the folder lacks; ``only`` lists choices of checkpoints."""
        self.case, self.folder, self.runs, self.draws = case, folder, runs, draws
        self.study = Study.load(case.path)
        self.train, self.pool = (self.study.split(key, None) for key in ("train", "target_data"))
        self.targets = self.pool.ids[: case.n_targets]
        self.choices = {k: v for k, v in self._choices().items() if k in only or not only}
        self.checkpoints = sorted({one for _, chosen in self.choices.values() for one in chosen})
        for run in range(runs):
            paths = [folder / f"{run}-{at}.pt" for at in case.times]
            if not paths[-1].exists():
                train_checkpoint(
                    checkpoints=paths,
                    study_file=case.path,
                    arguments={"epochs": case.epochs, "seed": run},
                    times=case.times,
                    threads=1,
                )
        self.weights, self.curvature = {}, {}
        for run, at in self.checkpoints:
            self._make_features(run, at, "targets", 0)
            for number in {0, *draws}:
                self._make_features(run, at, "train", number)
            with open_artifact(folder / f"{run}-{at}-train.h5", FEATURES) as file:
                self.weights[run, at] = file.vector("loss_weights")
                if file.has("curvature"):
                    self.curvature[run, at] = file.vector("curvature").astype(float)

    def _features(self, run: int, at: float, split: str, draws: int) -> Path:
        return self.folder / f"{run}-{at}-{split}{f'-{draws}' if draws else ''}.h5"

    def _make_features(self, run: int, at: float, split: str, draws: int) -> None:
        path = self._features(run, at, split, draws)
        if path.exists():
            return
        compute_features(
            features=path,
            checkpoint=self.folder / f"{run}-{at}.pt",
            study_file=self.case.path,
            spec=FeaturesSpec(
                model_output=self.case.model_output,
                parameter_patterns=None,
                projection={"kind": "rademacher", "proj_dim": _K, "seed": 0},
                dtype="float32",
                study_digest="",
                checkpoint=f"{run}-{at}",
                split=split,
                targets_digest=None if split == "train" else "",
                label_draws=draws,
            ),
            targets=None if split == "train" else self.targets,
            code="",
            device="cpu",
            batch_size=400,
            memory_mb=1000,
            threads=1,
        )

    def truth(self, fraction: float) -> GroundTruth:
        """Return subsets with a fraction of the samples, and outputs of models trained on them."""
        n, output = len(self.train.ids), self.case.model_output
        size = subset_size(n, fraction)
        masks = np.stack([random_subset(n, size, i, 0) for i in range(self.case.subsets)])
        outputs = np.empty((_SEEDS, len(masks), len(self.targets)))
        for seed, i in product(range(_SEEDS), range(len(masks))):
            path = self.folder / f"{fraction}-{i}-{seed}.npy"
            if not path.exists():
                weights = torch.tensor(masks[i], dtype=torch.float32)
                arguments = {"epochs": self.case.epochs, "seed": seed, "sample_weights": weights}
                model = trained_model(self.study, arguments)
                given = model, output, self.train, self.pool, 400, self.study
                np.save(path, outputs_and_predictions(*given)[0])
            outputs[seed, i] = np.load(path)[: len(self.targets)]
        return GroundTruth(masks.astype(float), outputs, [])

    def _choices(self) -> dict[str, tuple[bool, Chosen]]:
        """Return choices of checkpoints, and whether they include early ones."""
        times, runs = self.case.times, range(self.runs)
        early, late, end = times[1], times[-2], times[-1]
        return {
            "early and end": (True, list(product(runs, [early, end]))),
            "early and late": (True, list(product(runs, [early, late]))),
            "taking turns": (True, [(run, times[run % len(times)]) for run in runs]),
            "all times": (True, list(product(runs, times))),
            "all but the end": (True, list(product(runs, times[:-1]))),
            "ends": (False, list(product(runs, [end]))),
            "one end": (False, [(0, end)]),
        }

    def sums(
        self,
        masks: np.ndarray,
        chosen: Chosen,
        draws: int,
        dampings: Sequence[float],
        *,
        along: bool,
    ) -> dict[float, np.ndarray]:
        """Return subset sums of scores by damping, with the defaults for these checkpoints."""
        output = self.case.model_output
        combine = Combine.UNIT_AVERAGE if along else Combine.PRODUCT_OF_AVERAGES
        power = usual_power(combine, output)
        w_power = curvature_power(
            usual_weighting(combine, output),
            power,
            is_probability=about_output(output).weight_is_probability,
        )
        settings = [Setting(damping, power, combine, _K) for damping in dampings]
        averages = average_weights(settings, [self.weights[one] for one in chosen])
        total = dict.fromkeys(dampings, np.zeros(()))
        for run, at in chosen:
            diagonal = np.ones(masks.shape[1])
            if w_power is not None and not draws:
                diagonal = self.curvature[run, at] ** w_power
            with (
                open_artifact(self._features(run, at, "train", draws), FEATURES) as train,
                open_artifact(self._features(run, at, "targets", 0), FEATURES) as targets,
            ):
                rows = train.matrix("features")[:]
                checkpoint = CheckpointRows(
                    loss_weights=self.weights[run, at],
                    normal_weights={power: diagonal},
                    read=lambda start, stop, rows=rows: rows[start:stop],
                    target_features=targets.matrix("features")[:].astype(float),
                    block=len(rows),
                    normal_matrix=train.matrix("sampled_normal")[:] if draws else None,
                )
                for setting, share in setting_sums(masks, settings, averages, checkpoint).items():
                    total[setting.damping] = total[setting.damping] + share
        return total

    def fitted(self) -> list[str]:
        """Return a line with the mean loss weight and effective sample fraction at each time."""
        lines = []
        for at in sorted({at for _, at in self.checkpoints}):
            q = np.abs(
                np.stack([q for (_, when), q in self.weights.items() if when == at]).astype(float)
            )
            carried = (q.sum(1) ** 2 / (q**2).sum(1) / q.shape[1]).mean()
            lines.append(f"{at:g}: {q.mean():.4f}, {carried:.3f}")
        return lines


def measure(name: str, measured: Measured, fraction: float, dampings: Sequence[float]) -> list[Row]:
    """Return the rows of one study and fraction, and print them."""
    truth = measured.truth(fraction)
    sums = {
        (choice, draws, damping): own
        for choice, (along, chosen) in measured.choices.items()
        for draws in measured.draws
        for damping, own in measured.sums(truth.masks, chosen, draws, dampings, along=along).items()
    }
    keys, mean = list(sums), truth.outputs.mean(axis=0)
    drawn = bootstrap([*sums.values()], truth.outputs)
    each = [float(rank_correlations(own, mean).mean()) for own in sums.values()]
    rows = []
    for i, (choice, draws, damping) in enumerate(keys):
        same = "early and end"
        if len(measured.draws) > 1 or same not in measured.choices:
            same = choice
        first = keys.index((same, measured.draws[0], 2))
        gain = interval(drawn[:, i] - drawn[:, first], axis=0)
        own = interval(drawn[:, i], axis=0)
        numbers = (round(float(x), 4) for x in (each[i], *own, each[i] - each[first], *gain))
        rows.append(Row(name, fraction, choice, draws, damping, *numbers))
        print(("{:<20}{:>6} {:<16}{:>3}" + "{:>8.3g}" * 7).format(*asdict(rows[-1]).values()))
    low, high = interval(drawn[:, -1], axis=0)
    print(f"{name}, {fraction}: ceiling {low:.3f} to {high:.3f}", flush=True)
    return rows


def main() -> None:
    """Measure every study at every fraction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("studies", nargs="+", choices=CASES)
    parser.add_argument("--fractions", type=float, nargs="+", default=_FRACTIONS, help="kept")
    parser.add_argument("--subsets", type=int, help="of each fraction; default: the study's number")
    parser.add_argument("--only", nargs="+", default=[], help="choices of checkpoints")
    parser.add_argument("--dampings", type=float, nargs="+", default=_DAMPINGS, help="with 2")
    parser.add_argument("--draws", type=int, nargs="+", default=[0], help="numbers of labels")
    parser.add_argument("--folder", type=Path, help="folder of trained models")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "numpy", "trak-core"))
    print(about)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in asked.studies:
            folder = (asked.folder or Path(temporary)) / name
            folder.mkdir(parents=True, exist_ok=True)
            began = time.process_time()
            case = replace(CASES[name], subsets=asked.subsets or CASES[name].subsets)
            measured = Measured(case, folder, draws=asked.draws, only=asked.only)
            print(f"{name}: time: loss weight, part that carries it; {measured.fitted()}")
            for fraction in asked.fractions:
                rows += measure(name, measured, fraction, asked.dampings)
            print(f"{name}: {time.process_time() - began:.0f} processor seconds", flush=True)
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

"""LDS of `projection: gauss_newton` on images and tables, beside `exact` and a projection.

    python benchmarks/newton_studies.py breast_cancer digits_mlp digits --folder runs

Studies, their checkpoints, features (k = 512) and retrained models are those of
benchmarks/small_changes.py, whose --folder it shares (with fewer targets it has its own). Each way
scores the same checkpoints with its own defaults, except for the damping: one run's end, the ends
of some runs, and one early time and the end of each run. With `gauss_newton` the last are averaged
as ends are, because the unit average isn't to be had. Scores are the stages' own functions; --check
runs `trak run` too, for one run's end, and stops if its scores differ. Each cell is LDS, and how
far it is above the best damping of `exact` from the same checkpoints, with a paired 95 % bootstrap
interval over subsets and targets.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml
from board_study import save, written
from machine import environment, write_csv
from small_changes import CASES, Measured

from trak_core.attribution.gauss_newton_scores import newton_scores
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.scores import combined, powered
from trak_core.attribution.solve import DampedGramian
from trak_core.config.scoring_settings import usual_power, usual_weighting
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import bootstrap, rank_correlations
from trak_core.model_outputs.about_outputs import about_output
from trak_core.spec import Combine, FeaturesSpec, curvature_power
from trak_core.study.study import Study

EXACT, PROJECTED, NEWTON = "exact", "k = 512", "gauss_newton"
_DAMPINGS = 0.1, 0.3, 1, 2, 5, 10, 30, 100
_NEWTON_DAMPINGS = 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30
_BATCH, _MEMORY_MB = 64, 1000
Chosen = Sequence[tuple[int, float]]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One set of scores on subsets of one fraction, beside the best of `exact`."""

    study: str
    keeps: float
    checkpoints: str
    projection: str
    damping: float
    lds: float
    low: float
    high: float
    above: float
    above_low: float
    above_high: float


class Scorer:
    """One study's scores of its case's targets; what takes long is computed once."""

    def __init__(self, measured: Measured):
        """Take all of its runs."""
        self.measured, times, runs = measured, measured.case.times, measured.runs
        some, early, end = range(runs), times[1], times[-1]
        self.choices: dict[str, tuple[bool, Chosen]] = {
            "one run's end": (False, [(0, end)]),
            f"ends of {runs} runs": (False, [(run, end) for run in some]),
            "early and end of each": (True, [(run, at) for run in some for at in (early, end)]),
        }

    def _loaded(self, run: int, at: float) -> tuple[Study, LoadedModel]:
        case = self.measured.case
        spec = FeaturesSpec(
            model_output=case.model_output,
            parameter_patterns=None,
            projection={"kind": "exact"},
            dtype="float32",
            study_digest="",
            checkpoint=f"{run}-{at}",
            split="train",
            targets_digest=None,
        )
        path = self.measured.folder / f"{run}-{at}.pt"
        study = Study.load(case.path)
        return study, LoadedModel.of_study(study, path, spec, torch.device("cpu"))

    def _kept(self, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> Arrays:
        path = self.measured.folder / f"{name}-{len(self.measured.targets)}.npz"
        if not path.exists():
            values = compute()
            written(path, lambda path: save(path, values))
        with np.load(path) as file:
            return dict(file)

    def _products(self, run: int, at: float) -> Arrays:
        """Return K (n, n) and K_t (n, m)."""

        def compute() -> Arrays:
            study, loaded = self._loaded(run, at)
            train = study.split("train", None)
            targets = study.split("target_data", self.measured.targets)
            own = inner_products(loaded, train, None, _BATCH, _MEMORY_MB)[0]
            cross = inner_products(loaded, train, targets, _BATCH, _MEMORY_MB)[0]
            return {"gramian": own, "cross": cross}

        return self._kept(f"exact-{run}-{at}", compute)

    def newton(self, run: int, at: float, damping: float) -> Arrays:
        """Return A (n, m), and the processor seconds that it took."""

        def compute() -> Arrays:
            study, loaded = self._loaded(run, at)
            began = time.process_time()
            train = study.split("train", None)
            targets = study.split("target_data", self.measured.targets)
            made = newton_scores(loaded, train, targets, damping, _BATCH, _MEMORY_MB)
            return {"values": made.values, "seconds": np.array(time.process_time() - began)}

        return self._kept(f"newton-{run}-{at}-{damping:g}", compute)

    def of(self, way: str, damping: float, chosen: Chosen, combine: Combine) -> np.ndarray:
        """Return scores (n, m) of checkpoints together."""
        output, parts = self.measured.case.model_output, []
        power = usual_power(combine, output)
        for run, at in chosen:
            weights = powered(self.measured.weights[run, at], power)
            if way == NEWTON:
                parts.append((self.newton(run, at, damping)["values"], weights, 1.0))
                continue
            of_weights = np.ones(len(weights))
            w_power = curvature_power(
                usual_weighting(combine, output),
                power,
                is_probability=about_output(output).weight_is_probability,
            )
            if w_power is not None:
                of_weights = self.measured.curvature[run, at] ** w_power
            kept = self._products(run, at)
            damped = DampedGramian.factorize(kept["gramian"], of_weights, damping)
            norm = damped.train_norm(weights) if combine is Combine.UNIT_AVERAGE else 1.0
            parts.append((damped.similarities(kept["cross"]), weights, norm))
        return combined(parts, combine)

    def check(self, damping: float) -> None:
        """Stop unless `trak run` has these scores of one run's end too."""
        case, end = self.measured.case, self.measured.case.times[-1]
        config = {
            **{"study": str(case.path.resolve()), "model_output": case.model_output},
            "checkpoints": {"end": f"0-{end}.pt"},
            "experiments": {"asked": {"targets": [int(i) for i in self.measured.targets]}},
            **{"projection": NEWTON, "scoring": {"damping": damping}, "results": "checked"},
        }
        folder = self.measured.folder
        (folder / "checked.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "trak_core.command.main", "run", "checked.yaml"]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--cores", "1", "scores"], cwd=folder, env=environ, check=True)
        scores = np.asarray(pd.read_hdf(folder / "checked/scores/asked.h5", "scores"))
        own = self.of(NEWTON, damping, [(0, end)], Combine.PRODUCT_OF_AVERAGES)
        np.testing.assert_allclose(own, scores, rtol=1e-3, atol=1e-5 * float(np.abs(scores).max()))
        print(f"`trak run` has the same scores, damping {damping:g}", flush=True)


def measure(name: str, scorer: Scorer, fraction: float, dampings: Sequence[float]) -> list[Row]:
    """Return the rows of one study and fraction."""
    truth, rows = scorer.measured.truth(fraction), []
    mean = truth.outputs.mean(axis=0)
    for checkpoints, (along, chosen) in scorer.choices.items():
        plain = Combine.PRODUCT_OF_AVERAGES
        sums = {
            (way, damping): truth.masks
            @ scorer.of(
                way, damping, chosen, Combine.UNIT_AVERAGE if along and way == EXACT else plain
            )
            for way, tried in {EXACT: _DAMPINGS, NEWTON: dampings}.items()
            for damping in tried
        }
        projected = scorer.measured.sums(truth.masks, chosen, along=along)
        sums |= {(PROJECTED, damping): own for damping, own in projected.items()}
        each = {k: float(rank_correlations(own, mean).mean()) for k, own in sums.items()}
        best = max((case for case in sums if case[0] == EXACT), key=each.__getitem__)
        drawn = bootstrap([*sums.values()], truth.outputs)
        base = drawn[:, [list(sums).index(best)]]
        intervals = zip(
            np.transpose(interval(drawn, axis=0)),
            np.transpose(interval(drawn - base, axis=0)),
            strict=True,
        )
        for (way, damping), (own, beside) in zip(sums, intervals, strict=False):
            lds = each[way, damping]
            numbers = (round(float(x), 4) for x in (lds, *own, lds - each[best], *beside))
            rows.append(Row(name, fraction, checkpoints, way, damping, *numbers))
    return rows


def show(rows: list[Row]) -> None:
    """Print all rows."""
    print(
        "| study | keeps | checkpoints | projection | damping | LDS | above the best of `exact` |"
    )
    print("|---" * 7 + "|")
    for row in rows:
        print(
            f"| {row.study} | {row.keeps:g} | {row.checkpoints} | {row.projection} | "
            f"{row.damping:g} | {row.lds:.3f} ({row.low:.3f} to {row.high:.3f}) | "
            f"{row.above:+.3f} ({row.above_low:+.3f} to {row.above_high:+.3f}) |",
            flush=True,
        )


def main() -> None:
    """Measure every study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("studies", nargs="+", choices=CASES)
    parser.add_argument("--folder", type=Path, required=True, help="where all that is made stays")
    parser.add_argument("--runs", type=int, default=3, help="runs whose checkpoints are scored")
    parser.add_argument("--targets", type=int, default=40)
    parser.add_argument("--subsets", type=int, help="of each fraction; the study's own if left out")
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.99])
    parser.add_argument(
        "--dampings", type=float, nargs="+", default=_NEWTON_DAMPINGS, help="of `gauss_newton`"
    )
    parser.add_argument("--check", action="store_true", help="compare with `trak run`")
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "numpy", "trak-core"))
    print(about)
    rows: list[Row] = []
    for name in asked.studies:
        case = replace(CASES[name], n_targets=asked.targets)
        case = replace(case, subsets=asked.subsets or case.subsets)
        shared = case.n_targets == CASES[name].n_targets
        folder = asked.folder / (name if shared else f"{name}-{case.n_targets}")
        folder.mkdir(parents=True, exist_ok=True)
        measured = Measured(case, folder, asked.runs)
        scorer = Scorer(measured)
        if asked.check:
            scorer.check(0.1)
        more = [
            row
            for fraction in asked.keeps
            for row in measure(name, scorer, fraction, asked.dampings)
        ]
        seconds = float(scorer.newton(0, measured.case.times[-1], 0.1)["seconds"])
        show(more)
        print(f"{name}: {seconds / asked.targets:.2f} processor seconds a target", flush=True)
        rows += more
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

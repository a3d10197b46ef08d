"""Do checkpoints that agree on a target say that its scores are good? Marks beside LDS, by target.

    python benchmarks/target_marks.py digits_mlp diabetes breast_cancer --csv marks.csv

Studies, checkpoints, features (k = 512) and retrained models are those of
benchmarks/small_changes.py, whose --folder it shares. Scores are of some checkpoints together, with
damping 2 and the defaults of such checkpoints. A mark is a number for each target that needs no
retraining: the mean correlation, over pairs of checkpoints, of their scores of the target
(`agreement`); how many of its twenty strongest scores, ten of either sign, have a 95 % interval
over the checkpoints, Student's, without 0 (`sure`); the size of its scores, root mean square
(`size`); and the mean of f and its standard deviation over runs' ends (`f`, `f_sd`). A row is the
rank correlation of a mark with the LDS of each target, with a 95 % bootstrap interval over targets;
and the mean LDS of the quarters of the targets with the least and the largest marks. `again` is the
rank correlation between the LDS of two halves of the subsets, made that of all by Spearman and
Brown's formula: its root is about what a mark could reach at best.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch
from machine import environment, write_csv
from scipy.special import stdtrit
from small_changes import CASES, Chosen, Measured

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import GroundTruth, rank_correlations

_DAMPING, _EACH, _DRAWS = 2, 10, 2000


@dataclass(frozen=True)
class Row:
    """One mark of the targets of one study, for scores from some checkpoints."""

    study: str
    checkpoints: str
    lds: float
    again: float
    agree: float
    mark: str
    rank: float
    low: float
    high: float
    lds_least: float
    lds_largest: float


def _ranked(a: np.ndarray, b: np.ndarray) -> float:
    return float(rank_correlations(a[:, None], b[:, None])[0])


def _marks(each: np.ndarray, scores: np.ndarray, outputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return marks (m,) from scores of single checkpoints (c, n, m), of all, and f (runs, m)."""
    centred = each - each.mean(axis=1, keepdims=True)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    pairs = [np.einsum("nm,nm->m", unit[a], unit[b]) for a, b in combinations(range(len(each)), 2)]
    order = np.argsort(scores, axis=0)
    strongest = np.take_along_axis(
        each, np.concatenate([order[:_EACH], order[-_EACH:]])[None], axis=1
    )
    error = strongest.std(axis=0, ddof=1) / np.sqrt(len(each))
    width = stdtrit(len(each) - 1, 0.975) * error
    return {
        "agreement": np.mean(pairs, axis=0),
        "sure": (np.abs(strongest.mean(axis=0)) > width).sum(axis=0).astype(float),
        "size": np.sqrt((scores**2).mean(axis=0)),
        "f": outputs.mean(axis=0),
        "f_sd": outputs.std(axis=0),
    }


def _choices(measured: Measured) -> Mapping[str, tuple[bool, Chosen]]:
    times, runs = measured.case.times, range(measured.runs)
    return {
        f"ends of {measured.runs} runs": (False, [(run, times[-1]) for run in runs]),
        "ends of 2 runs": (False, [(run, times[-1]) for run in (0, 1)]),
        "one run, early and end": (True, [(0, times[1]), (0, times[-1])]),
        "one run, late and end": (True, [(0, times[-2]), (0, times[-1])]),
        "one run, all times": (True, list(product([0], times))),
    }


def _measure(name: str, measured: Measured, truth: GroundTruth) -> Iterator[Row]:
    mean, rng = truth.outputs.mean(axis=0), np.random.default_rng(0)
    n, everyone = truth.masks.shape[1], np.eye(truth.masks.shape[1])
    outputs = []
    for run in range(measured.runs):
        path = measured.folder / f"{run}-{measured.case.times[-1]}-targets.h5"
        with open_artifact(path, FEATURES) as file:
            outputs.append(file.vector("outputs"))
    for checkpoints, (along, chosen) in _choices(measured).items():
        scores = measured.sums(everyone, chosen, along=along)[_DAMPING]
        assert scores.shape[0] == n
        each = [measured.sums(everyone, [one], along=along)[_DAMPING] for one in chosen]
        sums = truth.masks @ scores
        lds = rank_correlations(sums, mean)
        halves = [rank_correlations(sums[half::2], mean[half::2]) for half in (0, 1)]
        again = _ranked(halves[0], halves[1])
        again = 2 * again / (1 + again)
        marks = _marks(np.stack(each), scores, np.stack(outputs))
        draws = rng.integers(len(lds), size=(_DRAWS, len(lds)))
        for mark, values in marks.items():
            drawn = rank_correlations(values[draws.T], lds[draws.T])
            low, high = interval(drawn, axis=0)
            order, quarter = np.argsort(values, kind="stable"), len(lds) // 4
            ends = lds[order[:quarter]].mean(), lds[order[-quarter:]].mean()
            numbers = (_ranked(values, lds), low, high, *ends)
            about = (lds.mean(), again, marks["agreement"].mean())
            a, b, c, *d = (round(float(x), 4) for x in (*about, *numbers))
            yield Row(name, checkpoints, a, b, c, mark, *d)


def main() -> None:
    """Measure the marks of every study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("studies", nargs="+", choices=CASES)
    parser.add_argument("--keeps", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, help="where what is trained stays")
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "numpy", "trak-core"))
    print(about)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in asked.studies:
            folder = (asked.folder or Path(temporary)) / name
            folder.mkdir(parents=True, exist_ok=True)
            measured = Measured(CASES[name], folder)
            for row in _measure(name, measured, measured.truth(asked.keeps)):
                print(
                    f"| {row.study} | {row.checkpoints} | {row.lds:.3f} | {row.again:.2f} | "
                    f"{row.agree:.2f} | {row.mark} | "
                    f"{row.rank:+.2f} ({row.low:+.2f} to {row.high:+.2f}) | "
                    f"{row.lds_least:.3f} | {row.lds_largest:.3f} |",
                    flush=True,
                )
                rows.append(row)
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()

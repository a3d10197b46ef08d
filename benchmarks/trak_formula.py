"""LDS of TRAK 0.3.2's formula with lambda 0 beside a study's scores: same features and models.

    python benchmarks/trak_formula.py results sample --dims 512 1024

Reads the finished study in a results folder that has an evaluation with ``subsets`` of the
experiment named. The formula is the whole of ``trak_core.compat``'s score computer, which the tests
compare with the package ``traker``: (G^T G)^-1 divided by the mean of its entries' sizes, for each
checkpoint, averaged over checkpoints, times average loss weights. Fewer columns than the study's
are a projection of their own, for rademacher and normal. Prints the table ``summary`` of
``docs/evaluation.md``, with its bootstrap intervals.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import torch

from trak_core.compat.score_computers import BasicScoreComputer
from trak_core.stages._truth import read_ground_truth
from trak_core.trust.lds import lds_tables


def _array(path: Path, key: str) -> np.ndarray:
    with h5py.File(path) as file:
        frame = file[key]
        assert isinstance(frame, h5py.Dataset)
        return frame[:]


def trak_scores(results: Path, experiment: str, checkpoints: list[str], dim: int) -> np.ndarray:
    """Return TRAK 0.3.2's scores from the first ``dim`` columns of features, shape (n, m)."""
    computer = BasicScoreComputer(torch.float32, "cpu")
    total, weights = torch.zeros(()), np.zeros(())
    for checkpoint in checkpoints:
        train, targets = (
            torch.tensor(
                pd.read_hdf(results / f"features/{checkpoint}/{split}.h5", "features").to_numpy()
            )[:, :dim].float()
            for split in ("train", experiment)
        )
        scores = torch.zeros(len(train), len(targets))
        features = computer.get_x_xtx_inv(train, computer.get_xtx(train))
        computer.get_scores(features, targets, accumulator=scores)
        total = total + scores
        scored = results / f"scores/{experiment}/{checkpoint}.h5"
        weights = weights + _array(scored, "loss_weights").astype(float)
    return total.numpy() * weights[:, None] / len(checkpoints) ** 2


def main() -> None:
    """Measure the formula at every number of columns, on the same draws as the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="folder of a finished study")
    parser.add_argument("experiment", help="one whose scores were measured")
    parser.add_argument("--dims", type=int, nargs="+", default=[512, 1024], help="columns")
    asked = parser.parse_args()
    final = asked.results / f"scores/{asked.experiment}.h5"
    scores = pd.read_hdf(final, "scores")
    train_ids, target_ids = scores.index.tolist(), scores.columns.tolist()
    halves = sorted((asked.results / "retrained").glob("[0-9]*-[0-9]*.h5"))
    truth = read_ground_truth(halves, train_ids, target_ids, None)
    checkpoints = sorted(path.stem for path in final.with_suffix("").glob("*.h5"))
    sums = {("scores", "scores", 0): truth.masks @ scores.to_numpy(dtype=float)}
    for dim in asked.dims:
        found = trak_scores(asked.results, asked.experiment, checkpoints, dim)
        sums["trak_0.3.2", "trak", dim] = truth.masks @ found
    summary, _, _ = lds_tables(sums, {}, truth, target_ids)
    sizes = len(checkpoints), len(truth.masks), len(target_ids)
    print("{} checkpoints, {} halves, {} targets".format(*sizes))
    print(summary.round(3).to_string(index=False))


if __name__ == "__main__":
    main()

"""Compare the LDS of TRAK 0.3.2's formula (lambda 0) with that of a study, on the same features.

    python benchmarks/trak_formula.py results sample --dims 512 1024

The script reads a finished study with an evaluation of the named experiment, and the files from
which the evaluation was computed. The formula is that of the score computer in
``trak_core.compat``, which tests compare with the package ``traker``. For each checkpoint, K is
(G^T G)^-1 divided by the mean absolute value of its entries, where G and T are the features of the
training samples and of the targets. The scores are the average of G K T^T over checkpoints, times
the average loss weights. The first columns of a `rademacher` or `normal` projection are themselves
a projection, so smaller dimensions need no new features.

Scores are computed from the last checkpoint of each run, as is usual for TRAK, and from all
checkpoints (``trak_along``) if there are more. The script prints the table ``summary`` of
``docs/reference/files.md``, with its bootstrap intervals.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EVALUATION,
    FEATURES,
    RETRAINED,
    SCORES,
    Artifact,
    open_artifact,
)
from trak_core.compat.score_computers import BasicScoreComputer
from trak_core.evaluation.lds import lds_tables
from trak_core.settings import ProjectionKind
from trak_core.stages.evaluate_scores import read_ground_truth


def _features(path: Path, dim: int) -> torch.Tensor:
    with open_artifact(path, FEATURES) as file:
        return torch.tensor(file.matrix("features")[:, :dim]).float()


def trak_scores(results: Path, experiment: str, checkpoints: list[str], dim: int) -> np.ndarray:
    """Return TRAK 0.3.2's scores from the first ``dim`` columns of features, shape (n, m)."""
    computer = BasicScoreComputer(torch.float32, "cpu")
    total, weights = torch.zeros(()), np.zeros(())
    for checkpoint in checkpoints:
        train, targets = (
            _features(results / f"features/{checkpoint}/{split}.h5", dim)
            for split in ("train", experiment)
        )
        scores = torch.zeros(len(train), len(targets))
        features = computer.get_x_xtx_inv(train, computer.get_xtx(train))
        computer.get_scores(features, targets, accumulator=scores)
        total = total + scores
        path = results / f"scores/{experiment}/{checkpoint}.h5"
        with open_artifact(path, CHECKPOINT_SCORES) as file:
            weights = weights + file.vector("loss_weights").astype(float)
    return total.numpy() * weights[:, None] / len(checkpoints) ** 2


def _retrained(results: Path, evaluation: Artifact) -> list[Path]:
    """Return the evaluation's files of retrained models in its order, without leftover files."""
    found = {}
    for path in (results / "retrained").glob("[0-9]*-[0-9]*.h5"):
        with open_artifact(path, RETRAINED) as file:
            found[file.content_hash] = path
    return [found[content_hash] for content_hash in evaluation.spec["retrained"]]


def main() -> None:
    """Measure the formula for each number of columns, with the bootstrap draws of the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", type=Path, help="folder of a finished study")
    parser.add_argument("experiment", help="an experiment with an evaluation")
    parser.add_argument("--dims", type=int, nargs="+", default=[512, 1024], help="columns")
    asked = parser.parse_args()
    with open_artifact(asked.results / f"evaluation/{asked.experiment}.h5", EVALUATION) as measured:
        spec, halves = measured.spec, _retrained(asked.results, measured)
    kind, proj_dim = (spec["projection"][key] for key in ("kind", "proj_dim"))
    for dim in asked.dims:
        if dim > proj_dim or (dim < proj_dim and not ProjectionKind(kind).about.nested):
            parser.error(f"{dim} columns of {kind} with {proj_dim} are not a projection themselves")
    with open_artifact(asked.results / f"scores/{asked.experiment}.h5", SCORES) as final:
        train_ids, target_ids = final.index("scores"), final.columns("scores")
        scores = final.matrix("scores")[:].astype(float)
    truth = read_ground_truth(halves, train_ids, target_ids, None)
    sums = {("scores", "scores", proj_dim): truth.masks @ scores}
    runs = spec["runs"].values()
    ends, everything = [run[-1] for run in runs], [one for run in runs for one in run]
    taken = {"trak_0.3.2": ends}
    if len(everything) > len(ends):
        taken["trak_along"] = everything
    for name, checkpoints in taken.items():
        for dim in asked.dims:
            found = trak_scores(asked.results, asked.experiment, checkpoints, dim)
            sums[name, "trak", dim] = truth.masks @ found
    summary, _, _ = lds_tables(sums, {}, truth, target_ids)
    sizes = len(everything), len(ends), len(truth.masks), len(target_ids)
    print("{} checkpoints of {} runs, {} halves, {} targets".format(*sizes))
    print(summary.round(3).to_string(index=False))


if __name__ == "__main__":
    main()

"""What scores by gradients of length 1 gain on the default study, by the features of its run.

    python benchmarks/normalized_digits.py results

Reads features and retrained models of the finished run in that folder and scores its experiment
`sample` as the run does (damping 2, power 0.75, curvature, unit average), and by three ways to
take out the lengths of training samples' gradients phi: "before" the normal matrix, which is then
made of phi / |phi|; "after", scores divided by |phi|; "under the inverse", scores divided by
sqrt(phi^T M^-1 phi). LDS with a 95 % bootstrap interval over halves and targets, and the paired
difference to the scores as they are.
"""

import argparse
from pathlib import Path

import numpy as np
from machine import environment

from trak_core.artifacts import FEATURES, open_artifact, read_frame
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import bootstrap, rank_correlations

_POWER, _DAMPING = 0.75, 2.0
_WAYS = "as it is", "before", "after", "under the inverse"


def share(folder: Path, way: str) -> tuple[np.ndarray, list[int], list[int]]:
    """Return one checkpoint's share of the scores, and the ids of its rows and columns."""
    with (
        open_artifact(folder / "train.h5", FEATURES) as train,
        open_artifact(folder / "sample.h5", FEATURES) as targets,
    ):
        phi = train.matrix("features")[:].astype(float)
        asked = targets.matrix("features")[:].astype(float)
        weights = train.vector("loss_weights").astype(float) ** _POWER
        curvature = train.vector("curvature").astype(float) ** _POWER
        ids = train.ids("sample_ids"), targets.ids("sample_ids")
    sizes = np.linalg.norm(phi, axis=1)
    if way == "before":
        phi /= sizes[:, None]
    normal = (phi * curvature[:, None]).T @ phi
    shift = _DAMPING * np.trace(normal) / len(phi)
    solved = np.linalg.solve(normal + shift * np.eye(len(normal)), np.vstack([phi, asked]).T)
    own, found = phi @ solved[:, : len(phi)], phi @ solved[:, len(phi) :]
    if way == "after":
        weights = weights / sizes
    elif way == "under the inverse":
        weights = weights / np.sqrt(np.diagonal(own))
    return weights[:, None] * found / np.linalg.norm(weights[:, None] * own), *ids


def main() -> None:
    """Score, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="of a finished run of the default study")
    results = parser.parse_args().results
    folders = sorted(path for path in (results / "features").glob("seed*-*") if path.is_dir())
    sums: dict[str, np.ndarray] = {}
    outputs = np.empty((0, 0, 0))
    for way in _WAYS:
        shares = [share(folder, way) for folder in folders]
        _, train_ids, target_ids = shares[0]
        scores = np.mean([one for one, _, _ in shares], axis=0)
        parts, models = [], []
        for path in sorted((results / "retrained").glob("[0-9]*-*.h5")):
            masks, _, columns = read_frame(path, "masks")
            found, _, asked = read_frame(path, "outputs")
            parts.append(masks[:, [columns.index(i) for i in train_ids]].astype(float))
            chosen = found[:, [asked.index(i) for i in target_ids]]
            models.append(chosen.reshape(len(masks), -1, len(target_ids)))
        outputs = np.concatenate(models).transpose(1, 0, 2).astype(float)
        sums[way] = np.concatenate(parts) @ scores
    drawn = bootstrap([*sums.values()], outputs)
    mean = outputs.mean(axis=0)
    print(environment("cpu", ("numpy", "torch")))
    print(f"{len(folders)} checkpoints, {outputs.shape[1]} halves, {outputs.shape[2]} targets")
    first = rank_correlations(sums[_WAYS[0]], mean).mean()
    intervals = zip(
        np.transpose(interval(drawn, axis=0)),
        np.transpose(interval(drawn - drawn[:, :1], axis=0)),
        strict=True,
    )
    for (way, found), (own, more) in zip(sums.items(), intervals, strict=False):
        lds = rank_correlations(found, mean).mean()
        print(
            f"| {way} | {lds:.3f} | {own[0]:.3f} to {own[1]:.3f} | {lds - first:+.3f} | "
            f"{more[0]:+.3f} to {more[1]:+.3f} |"
        )


if __name__ == "__main__":
    main()

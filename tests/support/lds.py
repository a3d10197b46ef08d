"""Compute the linear datamodeling score of the experiment `few` with SciPy."""

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr


def features_of(results: Path, checkpoint: str) -> list[np.ndarray]:
    """Return the features of training samples and of targets, float64."""
    paths = [results / f"features/{checkpoint}/{split}.h5" for split in ("train", "few")]
    return [pd.read_hdf(path, "features").to_numpy(float) for path in paths]


def lds_of(results: Path, scores: np.ndarray, *parts: str) -> float:
    """Return the mean rank correlation over targets, on the retrained models of some files."""
    files = [results / f"retrained/{part}.h5" for part in parts]
    masks, outputs = (pd.concat([pd.read_hdf(f, k) for f in files]) for k in ("masks", "outputs"))
    targets = pd.read_hdf(results / "scores/few.h5", "scores").columns.tolist()
    mean = outputs[targets].groupby(level=0).mean().to_numpy()
    sums = masks.to_numpy() @ scores
    return float(np.mean([spearmanr(*pair).statistic for pair in zip(sums.T, mean.T, strict=True)]))

"""Self-influences over all checkpoints: what two stages take from features and normal matrices."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    FEATURES,
    NORMAL_MATRIX,
    Artifact,
    check_made_for,
    check_same,
    open_artifact,
)
from trak_core.config.memory import scores_need
from trak_core.scoring.scores import combined, most_frequent
from trak_core.scoring.solve import damped_factor, damped_squares
from trak_core.scoring.weights import powered
from trak_core.spec import Combine, ScoresSpec
from trak_core.stages._splits import Damped
from trak_core.system.progress import blocks_with_progress


def _similarities(
    train: Artifact, damped: Damped, memory_mb: int, *, normalize: bool
) -> np.ndarray:
    """Return A_c[i, i] of every training sample, shape (n,)."""
    factor = damped_factor(damped.matrix, damped.lambda_, damped.ends)
    values = train.matrix("features")
    found = np.empty(len(values))
    block = scores_need(values.shape[1], 1).rows(memory_mb)
    for start, stop in blocks_with_progress(len(values), block, "training samples"):
        rows = values[start:stop]
        found[start:stop] = damped_squares(factor, rows)
        if normalize:
            # As a training sample it has length 1; as its own target it is as it is.
            lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
            found[start:stop] /= np.where(lengths > 0, lengths, 1)
    return found


def self_influences(
    features: Sequence[Path], normal_matrices: Sequence[Path], *, spec: ScoresSpec, memory_mb: int
) -> tuple[pd.DataFrame, np.ndarray, dict[str, Any]]:
    """Return A_c[i, i] Q_c[i] of every training sample i, averaged over checkpoints like a score.

    Predictions and outputs are those of the last checkpoint of every run.

    Args:
        features: Training features of each checkpoint.
        normal_matrices: Their normal matrices.
        spec: What decides the numbers: of all checkpoints, and no experiment.
        memory_mb: Budget for arrays; changes nothing but rounding.

    Returns:
        A table of id, label, prediction, output and self_influence, a row a sample; the loss
        weights averaged over ends of runs, shape (n,); and the specification of a file of these,
        which says how features were projected.

    Raises:
        InputError: If the files don't belong together, or if a damped matrix is singular.

    Source: Koh and Liang, "Understanding Black-box Predictions via Influence Functions", ICML 2017,
        section 5.4 (self-influence); spec of the scores, "What a score says".
    """
    assert spec.loss_weight_power is not None
    similarities, loss_weights, norms = [], [], []
    with ExitStack() as stack:
        files = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        for file, path, checkpoint in zip(files, normal_matrices, spec.checkpoints, strict=True):
            own = spec.under(checkpoint)
            check_made_for(file, own.of_train(), FEATURES.rule)
            ids = files[0].ids("sample_ids"), file.ids("sample_ids")
            check_same("training samples", *ids, file.path, FEATURES.rule)
            with open_artifact(path, NORMAL_MATRIX) as matrix:
                damped = Damped.of(matrix, file, own)
            own_scores = _similarities(file, damped, memory_mb, normalize=spec.normalize)
            similarities.append(own_scores[:, None])
            norms.append(damped.norm or 1.0)
            loss_weights.append(file.vector("loss_weights"))
        powers = [powered(weights, spec.loss_weight_power) for weights in loss_weights]
        parts = zip(similarities, powers, norms, strict=True)
        mean = combined(parts, Combine(spec.combine))[:, 0]
        shown = [files[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        predictions = np.stack([file.vector("predictions") for file in shown])
        is_class = predictions.dtype.kind != "f"
        table = pd.DataFrame({
            "id": files[0].ids("sample_ids"),
            "label": files[0].vector("labels"),
            "prediction": most_frequent(predictions) if is_class else predictions.mean(axis=0),
            "output": np.mean([file.vector("outputs") for file in shown], axis=0, dtype=np.float64),
            "self_influence": mean,
        })
        projection = {k: v for k, v in files[0].spec["projection"].items() if k != "stream"}
        mean_weights = np.stack([file.vector("loss_weights") for file in shown]).mean(
            axis=0, dtype=np.float64
        )
    return table, mean_weights, spec.as_dict() | {"projection": projection}

"""Measure whether samples with a wrong label stand out by their self-influence.

Which labels are wrong is known here, so that a ranking is compared with the truth. Nothing is
retrained here. What leaving suspects out is worth is what the proof of the list `suspects` says.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from trak_core.artifacts import FEATURES, FLIPPED, check_same, create, open_artifact, software
from trak_core.evaluation.lds import auc
from trak_core.spec import ScoresSpec
from trak_core.stages._shared import self_influences
from trak_core.study.retraining_draws import flipped_samples


def _recall(values: np.ndarray, flipped: np.ndarray) -> float:
    """Return which part of the flipped samples is among as many with the largest values."""
    n_flipped = int(flipped.sum())
    largest = np.argsort(-values, kind="stable")[:n_flipped]
    return float(flipped[largest].mean())


def find_flipped(
    *,
    flipped: Path,
    features: Sequence[Path],
    normal_matrices: Sequence[Path],
    original: Path,
    spec: ScoresSpec,
    code: str,
    memory_mb: int,
) -> None:
    """Rank the training samples of models trained with flipped labels, and count who is found.

    ``features`` and ``normal_matrices`` are those of checkpoints trained with the flipped labels;
    ``original`` are training features of any checkpoint, which have the true labels.
    """
    table, loss_weights, file_spec = self_influences(features, normal_matrices, spec, memory_mb)
    assert spec.features.flipped is not None
    is_flipped = flipped_samples(len(table["id"]), **spec.features.flipped)
    with open_artifact(original, FEATURES) as file:
        check_same("training samples", table["id"], file.ids("sample_ids"), file)
        labels = file.vector("labels")
    train = pd.DataFrame({
        "id": table["id"],
        "label": labels,
        "given_label": table["label"],
        "flipped": is_flipped.astype(np.int64),
        "self_influence": table["self_influence"],
        "loss_weight": loss_weights,
    })
    methods = ("self_influence", "loss_weight")
    detection = pd.DataFrame({
        "method": methods,
        "auc": [auc(train[name].to_numpy(), is_flipped) for name in methods],
        "found": [_recall(train[name].to_numpy(), is_flipped) for name in methods],
    })
    provenance = software(code, "cpu", "numpy", "scipy", "pandas")
    with create(flipped, FLIPPED, file_spec, provenance) as writer:
        writer.table("train", train, ["id", "self_influence"])
        writer.table("detection", detection, [])
    print(detection.to_string(index=False))

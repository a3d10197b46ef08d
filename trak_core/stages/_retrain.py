"""Retrain models on parts of the training data, and keep what they make of all targets.

A file of retrained models holds three frames:

    masks         (subsets, n) uint8   rows: subsets by number, columns: training ids; 1 where
                                       trained on
    outputs       (models, pool)       rows: models, each named by its subset's number; columns: ids
                                       of the study's target_data(); the model output f
    predictions   (models, pool)       the same rows and columns; what the model says

Models of one subset differ by the seed of their training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from trak_core.artifacts import RETRAINED, create
from trak_core.errors import InputError
from trak_core.model.sample_outputs import outputs_and_predictions
from trak_core.spec import RetrainedSpec
from trak_core.study.split import Split
from trak_core.study.study import Study, trained_model
from trak_core.system.progress import blocks_with_progress, software

_POOL = "target_data"


def retrain(
    *,
    retrained: Path,
    study: Study,
    train: Split,
    masks: np.ndarray,
    numbers: Sequence[int],
    seeds: Sequence[Sequence[int]],
    spec: RetrainedSpec,
    code: str,
    batch_size: int,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Train on each subset with each of its seeds, and write what the models say.

    ``masks`` (subsets, n), bool, say which samples belong to each subset; ``numbers`` name them.
    The study's ``train`` takes ``seed`` and ``data``; with ``spec.run_seeds``, for the very
    trainings of the runs except for what is left out, ``sample_weights`` in place of ``data``. What
    decided the subsets, beside ``spec``, is ``more``, and comes into the file's.
    """
    pool = study.split(_POOL, None)

    def say(seed: int, data: Any, weights: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        model = trained_model(study, {**spec.arguments, "seed": seed}, data, weights)
        return outputs_and_predictions(model, spec.model_output, train, pool, batch_size, study)

    runs = [(i, seed) for i in range(len(masks)) for seed in seeds[i]]
    results: list[tuple[np.ndarray, np.ndarray]] = []
    for start, _ in blocks_with_progress(len(runs), 1, "trainings"):
        subset, seed = runs[start]
        data = weights = None
        if spec.run_seeds:
            weights = torch.tensor(masks[subset], dtype=torch.float32)
        else:
            # A list of samples is a Dataset to torch; a study may need no more than len() and [i].
            data = Subset(train.samples, np.flatnonzero(masks[subset]).tolist())  # pyright: ignore[reportArgumentType]
        results.append(say(seed, data, weights))
        if weights is not None and start == numbers[0] == 0:
            # Every evaluation has this subset: its first run is trained twice more, on all samples.
            alike = say(seed, None, torch.ones_like(weights))[0], say(seed, None, None)[0]
            _check_weights(study, results[0][0], *alike)
    values, predictions = (np.stack(parts) for parts in zip(*results, strict=True))
    file_spec = spec.as_dict() | dict(more or {})
    rows = [int(numbers[subset]) for subset, _ in runs]
    with create(retrained, RETRAINED, file_spec, software(code, "cpu", "torch", "numpy")) as writer:
        frame = writer.matrix("masks", [int(i) for i in numbers], train.ids, dtype=np.uint8)
        frame[:] = masks
        writer.matrix("outputs", rows, pool.ids)[:] = values
        writer.matrix("predictions", rows, pool.ids, dtype=predictions.dtype)[:] = predictions


def _check_weights(study: Study, part: np.ndarray, ones: np.ndarray, none: np.ndarray) -> None:
    """Refuse a ``train`` that is another with weights of 1, or none other with some of 0.

    Rounding may differ: what weights of 1 change is less than a tenth of what is left out does.
    """
    moved, left_out = (np.abs(values - ones).mean() for values in (none, part))
    if moved < left_out / 10:
        return
    found = "weights of 1 to change outputs by a tenth or more of what weight 0 does"
    if not left_out:
        found = "the same outputs with weight 0"
    raise InputError(
        f"{study.path}: train() must multiply each sample's loss by its entry of `sample_weights`, "
        f"and draw the same with and without them. Found {found} for what is left out.",
        code="study.sample_weights",
    )

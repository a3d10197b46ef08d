"""Retrain models on parts of the training data, and keep what they make of all targets.

A file of retrained models holds two frames and, beside them, a third:

    masks         (subsets, n) uint8   rows: subsets by number, columns: training ids; 1 where
                                       trained on
    outputs       (models, pool)       rows: models, each named by its subset's number; columns: ids
                                       of the study's target_data(); the model output f
    predictions   (models, pool)       likewise

Models of one subset differ by the seed of their training.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import vmap
from torch.utils.data import Subset

from trak_core.artifacts import RETRAINED, create
from trak_core.gradients import as_batch, call, check_labels, count_classes, evaluation
from trak_core.models.named_output import CLIP, model_output
from trak_core.stages.train_checkpoint import trained_model
from trak_core.study.draws import random_half, training_seed
from trak_core.study.study import TRAIN, Split, Study
from trak_core.system.progress import blocks_with_progress
from trak_core.system.software import software

_POOL = "target_data"


def _explained(
    model: nn.Module, output_name: str, train: Split, pool: Split, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return f and prediction of every sample of the pool under one model."""
    device = next(model.parameters()).device
    output = model_output(output_name, model, train if output_name == CLIP else None, device)
    n_classes = count_classes(model, output, pool.batch(0, 1), device)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.no_grad(), evaluation(model):
        for start in range(0, len(pool.ids), batch_size):
            stop = min(start + batch_size, len(pool.ids))
            batch = as_batch(pool.batch(start, stop), output).mapped(lambda t: t.to(device))
            check_labels(batch.labels, output, n_classes, pool.ids[start:stop])
            outputs = output.read(call(model, batch))
            values = vmap(output.value)(outputs, batch.labels)
            predictions = vmap(output.prediction)(outputs, batch.labels)
            found.append((values.cpu().numpy(), predictions.cpu().numpy()))
    values, predictions = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return values, predictions


def retrain(
    *,
    retrained: Path,
    study: Study,
    train: Split,
    masks: np.ndarray,
    numbers: Sequence[int],
    seeds: Sequence[Sequence[int]],
    arguments: dict[str, Any],
    output: str,
    spec: dict[str, Any],
    code: str,
    batch_size: int,
) -> None:
    """Train on each subset with each of its seeds, and write what the models say.

    Args:
        retrained: The file to write.
        study: With a function ``train`` that takes ``seed`` and ``data``.
        train: Its training samples.
        masks: Which samples belong to each subset, shape (subsets, n), bool.
        numbers: The subsets' numbers.
        seeds: Seeds of the trainings on each subset.
        arguments: What else ``train`` gets.
        output: Name of the model output.
        spec: All else that decides the numbers.
        code: The stage's code digest.
        batch_size: Targets at once.

    Raises:
        InputError: If training fails, or if the targets are not what they must be.
    """
    pool = study.split(_POOL, None)
    runs = [(i, seed) for i in range(len(masks)) for seed in seeds[i]]
    results: list[tuple[np.ndarray, np.ndarray]] = []
    for start, _ in blocks_with_progress(len(runs), 1, "trainings"):
        subset, seed = runs[start]
        # A list of samples is a Dataset to torch; a study may need no more than len() and [i].
        data = Subset(train.samples, np.flatnonzero(masks[subset]).tolist())  # pyright: ignore[reportArgumentType]
        model = trained_model(study, {**arguments, "seed": seed}, data)
        results.append(_explained(model, output, train, pool, batch_size))
    values, predictions = (np.stack(parts) for parts in zip(*results, strict=True))
    file_spec = {**spec, "arguments": arguments, "model_output": output}
    rows = [int(numbers[subset]) for subset, _ in runs]
    with create(retrained, RETRAINED, file_spec, software(code, "cpu", "torch", "numpy")) as writer:
        frame = writer.matrix("masks", [int(i) for i in numbers], train.ids, dtype=np.uint8)
        frame[:] = masks
        writer.matrix("outputs", rows, pool.ids)[:] = values
        writer.matrix("predictions", rows, pool.ids, dtype=predictions.dtype)[:] = predictions


def retrain_subsets(
    *,
    retrained: Path,
    study: Path,
    arguments: dict[str, Any],
    first: int,
    last: int,
    seeds: int,
    seed: int,
    model_output: str,
    study_digest: str,
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Retrain on random halves, numbers ``first`` to ``last``.

    A subset and its trainings depend on its number and ``seed`` alone, not on how many there are.

    Args:
        retrained: The file to write.
        study: The study's Python file.
        arguments: Of its ``train``, but for ``seed`` and ``data``.
        first: Number of the first subset.
        last: Number of the last.
        seeds: Trainings on each.
        seed: Of the draws.
        model_output: Name of the model output.
        study_digest: Digest of the study's source.
        code: The stage's code digest.
        batch_size: Targets at once.
        threads: For torch.
    """
    torch.set_num_threads(threads)
    loaded = Study.load(study)
    train = loaded.split(TRAIN, None)
    numbers = range(first, last + 1)
    retrain(
        retrained=retrained,
        study=loaded,
        train=train,
        masks=np.stack([random_half(len(train.ids), i, seed) for i in numbers]),
        numbers=numbers,
        seeds=[[training_seed(seed, i, repeat) for repeat in range(seeds)] for i in numbers],
        arguments=arguments,
        output=model_output,
        spec={"study": study_digest, "subsets": "halves", "seeds": seeds, "seed": seed},
        code=code,
        batch_size=batch_size,
    )

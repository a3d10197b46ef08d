"""Retrain on random halves of the training data."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trak_core.stages._retrain import retrain
from trak_core.study.draws import random_half, training_seed
from trak_core.study.study import TRAIN, Study


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

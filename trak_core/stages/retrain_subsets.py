"""Retrain on random halves of the training data."""

from pathlib import Path

import numpy as np
import torch

from trak_core.spec import TRAIN, RetrainedSpec
from trak_core.stages._retrain import retrain
from trak_core.study.retraining_draws import random_half, training_seed
from trak_core.study.study import Study


def retrain_subsets(
    *,
    retrained: Path,
    study_file: Path,
    spec: RetrainedSpec,
    first: int,
    last: int,
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Retrain on random halves, numbers ``first`` to ``last``, both among them.

    A subset and its trainings depend on its number and the seed alone, not on how many there are.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    numbers = range(first, last + 1)
    retrain(
        retrained=retrained,
        study=study,
        train=train,
        masks=np.stack([random_half(len(train.ids), i, spec.seed) for i in numbers]),
        numbers=numbers,
        seeds=[[training_seed(spec.seed, i, j) for j in range(spec.seeds)] for i in numbers],
        spec=spec,
        code=code,
        batch_size=batch_size,
    )

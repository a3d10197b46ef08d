"""Retrain on random subsets of the training data."""

from pathlib import Path

import numpy as np
import torch

from trak_core.spec import TRAIN, RetrainedSpec, subset_size
from trak_core.stages._retrain import retrain
from trak_core.study.retraining_draws import random_subset, training_seed
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
    """Retrain on random subsets, numbers ``first`` to ``last``, both among them.

    A subset and its trainings depend on its number and the seed alone, not on how many there are.
    With ``spec.run_seeds`` all subsets have these seeds, and are trained by sample weights.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    numbers = range(first, last + 1)
    n_train = len(train.ids)
    size = subset_size(n_train, spec.fraction)
    retrain(
        retrained=retrained,
        study=study,
        train=train,
        masks=np.stack([random_subset(n_train, size, i, spec.seed) for i in numbers]),
        numbers=numbers,
        seeds=[
            spec.run_seeds or [training_seed(spec.seed, i, j) for j in range(spec.seeds)]
            for i in numbers
        ],
        spec=spec,
        code=code,
        batch_size=batch_size,
    )

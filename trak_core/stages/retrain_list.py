"""Retrain without the samples of a list, or on them alone, and beside it with random samples."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from trak_core.errors import InputError
from trak_core.evaluation.retrained_lists import sizes_of
from trak_core.spec import TRAIN, RetrainedSpec
from trak_core.stages._retrain import retrain
from trak_core.study.retraining_draws import random_removal, training_seed
from trak_core.study.study import Study
from trak_core.system.files import harmless

# Lists of samples to train on; those of the others are left out.
_KEPT = {"select"}


def listed_rows(listed: Path, train_ids: Sequence[int | str]) -> np.ndarray:
    """Return the rows of the training samples in a list, first ones first, each once.

    There may be none: nothing is a copy, nothing harms.
    """
    cells = pd.read_csv(listed, usecols=["id"], dtype=str, keep_default_na=False)["id"]
    row_of = {str(harmless(sample_id)): row for row, sample_id in enumerate(train_ids)}
    unknown = [cell for cell in cells if cell not in row_of]
    if unknown:
        raise InputError(
            f"{listed}: the list must name training samples of the study, to retrain without "
            f"them or on them. Found {unknown[0]}. Leave evaluation.lists.{listed.stem} out, or "
            "make the list anew.",
            code="stages.listed",
        )
    return np.array(list(dict.fromkeys(row_of[cell] for cell in cells)), dtype=np.int64)


def retrain_list(
    *,
    retrained: Path,
    listed: Path,
    study_file: Path,
    spec: RetrainedSpec,
    kind: str,
    fractions: Sequence[float],
    draw: int,
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Train on everything, then for each size by the list, then for each by random samples.

    A size is a part of the training samples, or the whole list where that is shorter. Models of
    one ``draw`` have one seed, and each draw random samples of its own. Samples of ``select`` are
    trained on alone, those of other lists are left out. An empty list has no sizes.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    n_train = len(train.ids)
    rows = listed_rows(listed, train.ids)
    is_kept = kind in _KEPT
    sizes = sizes_of(list(fractions), n_train, len(rows), rounds_up=is_kept)
    masks = [np.ones(n_train, dtype=bool)]
    for size in sizes:
        stays = np.ones(n_train, dtype=bool)
        stays[rows[:size]] = False
        masks.append(~stays if is_kept else stays)
    for size in sizes:
        stays = random_removal(n_train, size, draw, spec.seed)
        masks.append(~stays if is_kept else stays)
    retrain(
        retrained=retrained,
        study=study,
        train=train,
        masks=np.stack(masks),
        numbers=range(len(masks)),
        seeds=[[training_seed(spec.seed, 0, draw)]] * len(masks),
        spec=spec,
        code=code,
        batch_size=batch_size,
        more={"list": kind, "draw": draw, "sizes": sizes},
    )

"""Retrain without the samples that scores call most helpful, and without random ones.

Every group of models is trained with the same seeds, so that a model without some samples has one
that saw them all beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trak_core.artifacts import SCORES, Artifact, check_same, open_artifact
from trak_core.stages._retrain import retrain
from trak_core.study.draws import random_removal, random_removals, top_removals, training_seed
from trak_core.study.study import TRAIN, Study


def without_top(scores: Artifact, removals: Sequence[tuple[Any, int]]) -> np.ndarray:
    """Return which training samples stay, shape (removals, n), bool.

    Removed are the largest scores above 0, fewer than asked for where there are fewer.
    """
    values = scores.matrix("scores")
    column = {target: i for i, target in enumerate(scores.columns("scores"))}
    masks = np.ones((len(removals), len(values)), dtype=bool)
    for mask, (target, size) in zip(masks, removals, strict=True):
        own = values[:, column[target]]
        largest = np.argsort(-own, kind="stable")[:size]
        mask[largest[own[largest] > 0]] = False
    return masks


def retrain_without(
    *,
    retrained: Path,
    study: Path,
    scores: Path | None,
    experiment: dict[str, Any] | None,
    targets: Sequence[Any],
    n_removed: Sequence[int],
    draws: int,
    seeds: int,
    seed: int,
    arguments: dict[str, Any],
    model_output: str,
    study_digest: str,
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Retrain without the most helpful samples of some targets; or on everything and at random.

    Args:
        retrained: The file to write; see ``trak_core.stages._retrain``. Subset i is the
            i-th of ``top_removals``; without scores subset 0 is everything, and i + 1 the i-th of
            ``random_removals``.
        study: The study's Python file.
        scores: The experiment's scores; None for everything and random removals.
        experiment: What the scores must say of themselves.
        targets: Ids of the targets.
        n_removed: How many samples go, each number on its own.
        draws: Random removals of each number.
        seeds: Trainings on each subset.
        seed: Of draws and trainings.
        arguments: Of ``train``, but for ``seed`` and ``data``.
        model_output: Name of the model output.
        study_digest: Digest of the study's source.
        code: The stage's code digest.
        batch_size: Targets at once.
        threads: For torch.

    Raises:
        InputError: If more samples are to go than there are, or if training fails.
    """
    torch.set_num_threads(threads)
    loaded = Study.load(study)
    train = loaded.split(TRAIN, None)
    n_train = len(train.ids)
    spec = {"study": study_digest, "n_removed": list(n_removed), "seeds": seeds, "seed": seed}
    if scores is None:
        sizes = random_removals(n_removed, draws)
        masks = [np.ones(n_train, dtype=bool)]
        masks += [random_removal(n_train, size, draw, seed) for size, draw in sizes]
        masks = np.stack(masks)
        spec |= {"subsets": "everything and random removals", "draws": draws}
    else:
        assert experiment is not None
        with open_artifact(scores, SCORES) as file:
            found = {key: file.spec.get(key) for key in experiment}
            check_same("settings of today's config", experiment, found, scores, SCORES.rule)
            check_same("training samples", train.ids, file.index("scores"), scores, SCORES.rule)
            masks = without_top(file, top_removals(targets, n_removed))
            spec |= {
                "subsets": "without the most helpful samples",
                "scores": file.content_hash,
                "targets": list(targets),
            }
    retrain(
        retrained=retrained,
        study=loaded,
        train=train,
        masks=masks,
        numbers=range(len(masks)),
        seeds=[[training_seed(seed, 0, repeat) for repeat in range(seeds)]] * len(masks),
        arguments=arguments,
        output=model_output,
        spec=spec,
        code=code,
        batch_size=batch_size,
    )

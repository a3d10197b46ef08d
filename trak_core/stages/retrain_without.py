"""Retrain without the samples that scores call most helpful, and without random samples.

Every group of models is trained with the same seeds, so that a model without some samples has one
that saw them all beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trak_core.artifacts import SCORES, Artifact, check_made_for, check_same, open_artifact
from trak_core.spec import TRAIN, RetrainedSpec, ScoresSpec
from trak_core.stages._retrain import retrain
from trak_core.study.retraining_draws import (
    random_removal,
    random_removals,
    top_removals,
    training_seed,
)
from trak_core.study.study import Study


def without_top(scores: Artifact, removals: Sequence[tuple[Any, int]]) -> np.ndarray:
    """Return which samples stay, (removals, n), bool: the largest scores go, if above 0."""
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
    study_file: Path,
    spec: RetrainedSpec,
    scores: Path | None = None,
    scores_spec: ScoresSpec | None = None,
    target_ids: Sequence[Any] = (),
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Retrain without the most helpful samples of some targets; or on everything and at random.

    With ``scores``, which must be made by ``scores_spec``, subset i is the i-th of
    ``top_removals``. Without, subset 0 is everything, and i + 1 the i-th of ``random_removals``.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    n_train = len(train.ids)
    more: dict[str, Any] = {}
    assert (spec.subsets == "random removals") == (scores is None)
    if scores is None:
        masks = [np.ones(n_train, dtype=bool)]
        for size, draw in random_removals(spec.n_removed, spec.draws):
            masks.append(random_removal(n_train, size, draw, spec.seed))
        masks = np.stack(masks)
    else:
        assert scores_spec is not None
        with open_artifact(scores, SCORES) as file:
            check_made_for(file, scores_spec, SCORES.rule)
            check_same("training samples", train.ids, file.index("scores"), scores, SCORES.rule)
            masks = without_top(file, top_removals(target_ids, spec.n_removed))
            more = {"scores": file.content_hash, "targets": list(target_ids)}
    retrain(
        retrained=retrained,
        study=study,
        train=train,
        masks=masks,
        numbers=range(len(masks)),
        seeds=[[training_seed(spec.seed, 0, j) for j in range(spec.seeds)]] * len(masks),
        spec=spec,
        code=code,
        batch_size=batch_size,
        more=more,
    )

"""Retrain models on parts of the training data, and keep what they make of all targets.

Every evaluation by retraining comes from here: random halves for the LDS, and a list of samples
left out (or trained on alone) beside as many random ones, with the same seeds. A target's most
helpful samples are such a list. A file of retrained models holds three frames:

    masks         (subsets, n) uint8   rows: subsets by number, columns: training ids; 1 where
                                       trained on
    outputs       (models, pool)       rows: models, each named by its subset's number; columns: ids
                                       of the study's target_data(); the model output f
    predictions   (models, pool)       the same rows and columns; what the model says

Models of one subset differ by the seed of their training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from trak_core.artifacts import (
    EMBEDDINGS,
    RETRAINED,
    SCORES,
    check_made_for,
    check_same,
    create,
    open_artifact,
)
from trak_core.errors import InputError
from trak_core.evaluation.baselines import Bm25
from trak_core.model.sample_outputs import outputs_and_predictions
from trak_core.scoring.scores import unit_rows
from trak_core.spec import TRAIN, FeaturesSpec, RetrainedSpec, ScoresSpec, subset_size
from trak_core.stages._inputs import content_hashes, read_embeddings
from trak_core.study.retraining_draws import (
    random_removal,
    random_removals,
    random_subset,
    sizes_of,
    top_removals,
    training_seed,
)
from trak_core.study.split import Split
from trak_core.study.study import Study, trained_model
from trak_core.system.files import file_digest, harmless
from trak_core.system.progress import blocks_with_progress, software

_POOL = "target_data"
# Lists of samples to train on; those of the others are left out.
_KEPT = {"select"}


@dataclass(frozen=True, slots=True)
class _Subsets:
    """What to train on: ``masks`` (subsets, n), bool, with the number and the seeds of each.

    What decided them, beside the spec, is ``more``, and comes into the file's.
    """

    masks: Sequence[np.ndarray]
    numbers: Sequence[int]
    seeds: Sequence[Sequence[int]]
    more: dict[str, Any] = field(default_factory=dict)


def retrain(
    *,
    retrained: Path,
    study_file: Path,
    spec: RetrainedSpec,
    first: int = 0,
    last: int = 0,
    scores: Path | None = None,
    scores_spec: ScoresSpec | None = None,
    target_ids: Sequence[Any] = (),
    baseline: str | None = None,
    digest: str | None = None,
    embeddings: Sequence[Path] = (),
    embeddings_spec: FeaturesSpec | None = None,
    checkpoints: Sequence[str] = (),
    listed: Path | None = None,
    kind: str = "",
    fractions: Sequence[float] = (),
    draw: int = 0,
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Train on each subset with each of its seeds, and write what the models say.

    The study's ``train`` takes ``seed`` and ``data``; with ``spec.run_seeds``, for the very
    trainings of the runs except for what is left out, ``sample_weights`` in place of ``data``.
    The other arguments say more of the subsets that ``spec.subsets`` names:

    - ``random``: numbers ``first`` to ``last``, both among them. A subset and its trainings depend
      on its number and the seed alone, not on how many there are; with ``spec.run_seeds`` all
      subsets have these seeds.
    - ``random removals``: everything, then subset i + 1 is without the i-th of ``random_removals``.
    - ``top removals``: subset i is without the i-th of ``top_removals``, the most helpful samples
      of ``target_ids`` by ``scores``, which must be made by ``scores_spec``.
    - ``top by`` a baseline: likewise, by ``bm25`` of the study's texts, whose ``digest`` counts, or
      by ``embedding_cosine``, mean over files of ``embeddings`` under ``checkpoints``.
    - ``list``: everything, then for each size by the list in ``listed``, then for each by random
      samples. A size is one of the ``fractions`` of the training samples, or the whole list where
      that is shorter. Models of one ``draw`` have one seed, and each draw random samples of its
      own. Samples of ``select`` (``kind``) are trained on alone, those of other lists are left out.
      An empty list has no sizes.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    if spec.subsets == "random":
        subsets = _random(len(train.ids), spec, range(first, last + 1))
    elif spec.subsets == "random removals":
        subsets = _without_random(len(train.ids), spec)
    elif spec.subsets == "top removals":
        assert scores is not None
        assert scores_spec is not None
        subsets = _without_top(train, spec, scores, scores_spec, target_ids)
    elif baseline is not None:
        if baseline == "bm25":
            index = Bm25.of(study.words(train))
            asked = study.words(study.split("target", target_ids))
            columns = [index.scores(words) for words in asked]
        else:
            assert embeddings_spec is not None
            given = embeddings, embeddings_spec, checkpoints, train.ids, target_ids
            cosines = [
                unit_rows(read(0, len(train.ids))) @ unit_rows(of_targets).T
                for read, of_targets in read_embeddings(*given)
            ]
            columns = list(np.mean(cosines, axis=0).T)
        hashes = content_hashes(embeddings, EMBEDDINGS)
        more = {"targets": list(target_ids), "digest": digest, "embeddings": hashes}
        subsets = _without_each(
            len(train.ids), spec, dict(zip(target_ids, columns, strict=True)), more
        )
    else:
        assert listed is not None
        rows = listed_rows(listed, train.ids)
        subsets = _by_list(len(train.ids), rows, spec, kind, fractions, draw)
        subsets.more["listed"] = file_digest(listed)
    _train(retrained, study, train, subsets, spec, code, batch_size)


def _random(n_train: int, spec: RetrainedSpec, numbers: Sequence[int]) -> _Subsets:
    size = subset_size(n_train, spec.fraction)
    masks = [random_subset(n_train, size, i, spec.seed) for i in numbers]
    return _Subsets(masks, numbers, [spec.run_seeds or _seeds(spec, i) for i in numbers])


def _without_random(n_train: int, spec: RetrainedSpec) -> _Subsets:
    masks = [
        random_removal(n_train, size, draw, spec.seed)
        for size, draw in random_removals(spec.n_removed, spec.draws)
    ]
    return _from_0([np.ones(n_train, dtype=bool), *masks], _seeds(spec))


def _without_top(
    train: Split,
    spec: RetrainedSpec,
    scores: Path,
    scores_spec: ScoresSpec,
    target_ids: Sequence[Any],
) -> _Subsets:
    with open_artifact(scores, SCORES) as file:
        check_made_for(file, scores_spec, SCORES.rule)
        check_same("training samples", train.ids, file.index("scores"), scores, SCORES.rule)
        values, columns = file.matrix("scores"), file.columns("scores")
        column = {target: i for i, target in enumerate(columns)}
        of_targets = {target: values[:, column[target]] for target in target_ids}
        more = {"scores": file.content_hash, "targets": list(target_ids)}
    return _without_each(len(train.ids), spec, of_targets, more)


def _without_each(
    n_train: int, spec: RetrainedSpec, scores: Mapping[Any, np.ndarray], more: dict[str, Any]
) -> _Subsets:
    """Return subsets without what helps a target most, by its scores, shape (n,)."""
    rows = {target: helpful_rows(own) for target, own in scores.items()}
    masks = [
        _without(n_train, rows[target], size)
        for target, size in top_removals(list(scores), spec.n_removed)
    ]
    return _from_0(masks, _seeds(spec), more)


def _by_list(
    n_train: int,
    rows: np.ndarray,
    spec: RetrainedSpec,
    kind: str,
    fractions: Sequence[float],
    draw: int,
) -> _Subsets:
    is_kept = kind in _KEPT
    sizes = sizes_of(list(fractions), n_train, len(rows), rounds_up=is_kept)
    masks = [_without(n_train, rows, size) for size in sizes]
    masks += [random_removal(n_train, size, draw, spec.seed) for size in sizes]
    masks = [~mask for mask in masks] if is_kept else masks
    seeds = [training_seed(spec.seed, 0, draw)]
    more = {"list": kind, "draw": draw, "sizes": sizes}
    return _from_0([np.ones(n_train, dtype=bool), *masks], seeds, more)


def _from_0(
    masks: Sequence[np.ndarray], seeds: Sequence[int], more: dict[str, Any] | None = None
) -> _Subsets:
    """Return subsets that all have the same seeds: what a seed does cancels between them."""
    return _Subsets(masks, range(len(masks)), [seeds] * len(masks), more or {})


def _seeds(spec: RetrainedSpec, subset: int = 0) -> list[int]:
    return [training_seed(spec.seed, subset, j) for j in range(spec.seeds)]


def _without(n_train: int, rows: np.ndarray, size: int) -> np.ndarray:
    """Return which samples stay without the first of a list, shape (n,), bool."""
    stays = np.ones(n_train, dtype=bool)
    stays[rows[:size]] = False
    return stays


def helpful_rows(scores: np.ndarray) -> np.ndarray:
    """Return the rows of a target's scores above 0, the largest first."""
    rows = np.argsort(-scores, kind="stable")
    return rows[scores[rows] > 0]


def listed_rows(listed: Path, train_ids: Sequence[int | str]) -> np.ndarray:
    """Return the rows of the training samples in a list, first ones first, each once.

    There may be none: nothing is a copy, nothing harms.
    """
    # Only here, because no other subsets come from a table.
    import pandas as pd

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


def _train(
    retrained: Path,
    study: Study,
    train: Split,
    subsets: _Subsets,
    spec: RetrainedSpec,
    code: str,
    batch_size: int,
) -> None:
    pool = study.split(_POOL, None)

    def say(seed: int, data: Any, weights: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        model = trained_model(study, {**spec.arguments, "seed": seed}, data, weights)
        return outputs_and_predictions(model, spec.model_output, train, pool, batch_size, study)

    runs = [(i, seed) for i, seeds in enumerate(subsets.seeds) for seed in seeds]
    results: list[tuple[np.ndarray, np.ndarray]] = []
    for start, _ in blocks_with_progress(len(runs), 1, "trainings"):
        subset, seed = runs[start]
        mask, data, weights = subsets.masks[subset], None, None
        if spec.run_seeds:
            weights = torch.tensor(mask, dtype=torch.float32)
        else:
            # A list of samples is a Dataset to torch; a study may need no more than len() and [i].
            data = Subset(train.samples, np.flatnonzero(mask).tolist())  # pyright: ignore[reportArgumentType]
        results.append(say(seed, data, weights))
        if weights is not None and start == subsets.numbers[0] == 0:
            # Every evaluation has this subset: its first run is trained twice more, on all samples.
            alike = say(seed, None, torch.ones_like(weights))[0], say(seed, None, None)[0]
            _check_weights(study, results[0][0], *alike)
    values, predictions = (np.stack(parts) for parts in zip(*results, strict=True))
    file_spec, numbers = spec.as_dict() | subsets.more, list(subsets.numbers)
    rows = [numbers[subset] for subset, _ in runs]
    with create(retrained, RETRAINED, file_spec, software(code, "cpu", "torch", "numpy")) as writer:
        writer.matrix("masks", numbers, train.ids, dtype=np.uint8)[:] = np.stack(subsets.masks)
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

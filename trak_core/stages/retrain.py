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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from trak_core.artifacts import (
    RETRAINED,
    SCORES,
    check_made_for,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.sample_outputs import outputs_and_predictions
from trak_core.attribution.scores import unit_rows
from trak_core.errors import InputError
from trak_core.evaluation.baselines import Bm25
from trak_core.spec import (
    TRAIN,
    FeaturesSpec,
    RetrainedSpec,
    ScoresSpec,
    parse_spec,
    removed_sizes,
    subset_size,
)
from trak_core.stages._shared import embeddings_hashes, naming_in_file, read_embeddings
from trak_core.study.dataset_split import Split
from trak_core.study.retraining_draws import random_removal, random_subset, sizes_of, training_seed
from trak_core.study.study import Study, trained_model
from trak_core.system.files import file_digest, harmless
from trak_core.system.progress import blocks_with_progress

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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What says which subsets: see ``retrain``."""

    study: Study
    train: Split
    spec: RetrainedSpec
    named_by: Sequence[Path]
    naming: Mapping[str, Any]
    numbers: Sequence[int]

    @property
    def n_train(self) -> int:
        return len(self.train.ids)


def retrain(
    *,
    retrained: Path,
    study_file: Path,
    spec: RetrainedSpec,
    named_by: Sequence[Path] = (),
    naming: dict[str, Any] | None = None,
    first: int = 0,
    last: int = 0,
    code: str,
    batch_size: int,
    threads: int,
) -> None:
    """Train on each subset with each of its seeds, and write what the models say.

    The study's ``train`` takes ``seed`` and ``data``; with ``spec.run_seeds``, for the very
    trainings of the runs except for what is left out, ``sample_weights`` in place of ``data``.
    ``spec.subsets`` says which subsets. Files in ``named_by`` name samples, ``naming`` says how:

    - ``random``: numbers ``first`` to ``last``, both among them. A subset and its trainings depend
      on its number and the seed alone, not on how many there are; with ``spec.run_seeds`` all
      subsets have these seeds.
    - ``without random``: everything, then for each size each of ``spec.draws``.
    - ``without top``: for each of ``target_ids`` each size, by a file of scores, which must be made
      by ``scores_spec``: the target's most helpful samples.
    - ``without bm25``: likewise, by the study's texts.
    - ``without embedding_cosine``: likewise, by the mean over files of embeddings, which must be
      made by ``embeddings_spec`` under ``checkpoints``.
    - ``list``: everything, then each size by a list, then each by random samples. A size is one of
      the ``fractions`` of the training samples, or the whole list where that is shorter. Models of
      one ``draw`` have one seed, and each draw random samples of its own. Samples of ``select``
      (``kind``) are trained on alone, those of other lists are left out. An empty list has no
      sizes.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train = study.split(TRAIN, None)
    asked = _Asked(study, train, spec, named_by, naming or {}, range(first, last + 1))
    _train(retrained, study, train, _KINDS[spec.subsets](asked), spec, code, batch_size)


def _random(asked: _Asked) -> _Subsets:
    n_train, spec, numbers = asked.n_train, asked.spec, asked.numbers
    size = subset_size(n_train, spec.fraction)
    masks = [random_subset(n_train, size, i, spec.seed) for i in numbers]
    return _Subsets(masks, numbers, [spec.run_seeds or _seeds(spec, i) for i in numbers])


def _without_random(asked: _Asked) -> _Subsets:
    n_train, spec = asked.n_train, asked.spec
    sizes = removed_sizes(spec.n_removed, n_train)
    masks = [
        random_removal(n_train, n, draw, spec.seed) for n in sizes for draw in range(spec.draws)
    ]
    return _of_removals(asked, [np.ones(n_train, dtype=bool), *masks], sizes, _seeds(spec))


def _by_scores(asked: _Asked) -> _Subsets:
    (scores,), target_ids = asked.named_by, asked.naming["target_ids"]
    with open_artifact(scores, SCORES) as file:
        check_made_for(file, parse_spec(ScoresSpec, asked.naming["scores_spec"]))
        check_same("training samples", asked.train.ids, file.index("scores"), file)
        values, columns = file.matrix("scores"), file.columns("scores")
        column = {target: i for i, target in enumerate(columns)}
        of_targets = [values[:, column[target]] for target in target_ids]
        return _without_top(asked, of_targets, [file.content_hash])


def _by_words(asked: _Asked) -> _Subsets:
    index = Bm25.of(asked.study.words(asked.train))
    targets = asked.study.split("target", asked.naming["target_ids"])
    of_targets = [index.scores(words) for words in asked.study.words(targets)]
    return _without_top(asked, of_targets)


def _by_embeddings(asked: _Asked) -> _Subsets:
    about, target_ids = asked.naming, asked.naming["target_ids"]
    spec = parse_spec(FeaturesSpec, about["embeddings_spec"])
    files = read_embeddings(asked.named_by, spec, about["checkpoints"], asked.train.ids, target_ids)
    cosines = [
        unit_rows(read(0, asked.n_train)) @ unit_rows(of_targets).T for read, of_targets in files
    ]
    return _without_top(asked, np.mean(cosines, axis=0).T, embeddings_hashes(asked.named_by))


def _without_top(
    asked: _Asked, of_targets: Iterable[np.ndarray], named_by: Sequence[str] = ()
) -> _Subsets:
    """Return subsets without what helps a target most, by its scores, shape (n,)."""
    sizes = removed_sizes(asked.spec.n_removed, asked.n_train)
    rows = map(helpful_rows, of_targets)
    masks = [_without(asked.n_train, own, size) for own in rows for size in sizes]
    return _of_removals(asked, masks, sizes, _seeds(asked.spec), named_by)


def _by_list(asked: _Asked) -> _Subsets:
    (listed,), n_train = asked.named_by, asked.n_train
    kind, draw = asked.naming["kind"], asked.naming["draw"]
    rows = listed_rows(listed, asked.train.ids)
    sizes = sizes_of(asked.naming["fractions"], n_train, len(rows), rounds_up=kind in _KEPT)
    masks = [_without(n_train, rows, size) for size in sizes]
    masks += [random_removal(n_train, size, draw, asked.spec.seed) for size in sizes]
    masks = [~mask for mask in masks] if kind in _KEPT else masks
    seeds = [training_seed(asked.spec.seed, 0, draw)]
    masks = [np.ones(n_train, dtype=bool), *masks]
    return _of_removals(asked, masks, sizes, seeds, [file_digest(listed)])


# What ``spec.subsets`` may be.
_KINDS: dict[str, Callable[[_Asked], _Subsets]] = {
    "random": _random,
    "without random": _without_random,
    "without top": _by_scores,
    "without bm25": _by_words,
    "without embedding_cosine": _by_embeddings,
    "list": _by_list,
}


def _of_removals(
    asked: _Asked,
    masks: Sequence[np.ndarray],
    sizes: Sequence[int],
    seeds: Sequence[int],
    named_by: Sequence[str] = (),
) -> _Subsets:
    """Return subsets that all have the same seeds: what a seed does cancels between them.

    ``named_by`` are hashes of the files that name samples.
    """
    more = naming_in_file(asked.naming) | {"sizes": list(sizes), "named_by": list(named_by)}
    return _Subsets(masks, range(len(masks)), [seeds] * len(masks), more)


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
            f"them or on them. Found {unknown[0]}. Leave evaluation.removals.{listed.stem} out, or "
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
    observed = "weights of 1 to change outputs by a tenth or more of what weight 0 does"
    if not left_out:
        observed = "the same outputs with weight 0"
    raise InputError(
        f"{study.path}: train() must multiply each sample's loss by its entry of `sample_weights`, "
        f"and draw the same with and without them. Found {observed} for what is left out.",
        code="study.sample_weights",
    )

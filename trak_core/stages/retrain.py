"""Retrain models on subsets of the training data, and write their outputs for all targets.

``docs/reference/files.md`` describes the frames in a file of retrained models.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from trak_core.artifacts import RETRAINED, SCORES, check_same, create, software
from trak_core.attribution.sample_outputs import outputs_and_predictions
from trak_core.errors import InputError
from trak_core.runtime.files import file_digest, safe_cell
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import (
    TRAIN,
    FeaturesSpec,
    RetrainedSpec,
    ScoresSpec,
    parse_spec,
    removed_sizes,
    subset_size,
)
from trak_core.stages._shared import (
    bm25_of_targets,
    embeddings_hashes,
    naming_in_file,
    open_made_for,
    positions,
    read_directions,
)
from trak_core.study.dataset_split import Split
from trak_core.study.retraining_draws import random_removal, random_subset, sizes_of, training_seed
from trak_core.study.study import Study, trained_model

_TARGETS = "target_data"
# Models are trained only on the samples of a list of this kind, but without those of other lists.
_SELECT = "select"


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
    """Train a model on each subset with each of its seeds, and write outputs and predictions.

    The study's ``train`` is called with ``seed`` and ``data``.

    ``spec.subsets`` is the kind of subsets. ``named_by`` contains the files from which samples are
    chosen, and ``naming`` contains the settings by which they are chosen. The kinds are:

    - ``random``: random subsets with the numbers ``first`` to ``last``. A subset and its seeds
      depend only on its number and ``spec.seed``.
    - ``without random``: all samples, then ``spec.draws`` random removals of each size.
    - ``without top``: for each of ``target_ids`` and each size, all samples except those with the
      largest scores for the target. ``named_by`` is a file of scores made for ``scores_spec``.
    - ``without bm25``: as ``without top``, but the scores are BM25 scores of the study's texts.
    - ``without embedding_cosine``: as ``without top``, but the scores are mean cosines of
      embeddings. ``named_by`` contains files made for ``embeddings_spec`` with ``checkpoints``.
    - ``list``: all samples; then, for each size, all samples except the first ones in the list
      ``named_by``; then, for each size, all samples except random ones. Sizes are ``fractions`` of
      the training samples, but not larger than the list. For a list of the ``kind`` select, models
      are trained only on the samples that are otherwise left out. Each ``draw`` has a different
      seed and different random samples.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    train, naming = study.split(TRAIN, None), naming or {}
    n_train, numbers = len(train.ids), range(first, last + 1)
    file_spec = spec.as_dict()
    if spec.subsets == "random":
        size = subset_size(n_train, spec.fraction)
        masks = [random_subset(n_train, size, i, spec.seed) for i in numbers]
        seeds = [_seeds(spec, i) for i in numbers]
    else:
        masks, sizes, hashes = _removals(study, train, spec, named_by, naming)
        numbers = range(len(masks))
        # All subsets have the same seeds, so that the effects of seeds cancel in differences.
        is_list = spec.subsets == "list"
        common = [training_seed(spec.seed, 0, naming["draw"])] if is_list else _seeds(spec, 0)
        seeds = [common] * len(masks)
        file_spec |= naming_in_file(naming) | {"sizes": sizes, "named_by": hashes}
    targets = study.split(_TARGETS, None)
    runs = [(i, seed) for i, seeds_of_subset in enumerate(seeds) for seed in seeds_of_subset]
    results: list[tuple[np.ndarray, np.ndarray]] = []
    for run, _ in blocks_with_progress(len(runs), 1, "trainings"):
        i, seed = runs[run]
        # Subset is annotated to require a Dataset, but needs only len() and [i].
        data = Subset(train.samples, np.flatnonzero(masks[i]).tolist())  # pyright: ignore[reportArgumentType]
        model = trained_model(study, {**spec.arguments, "seed": seed}, data)
        results.append(
            outputs_and_predictions(model, spec.model_output, train, targets, batch_size, study)
        )
    values, predictions = (np.stack(parts) for parts in zip(*results, strict=True))
    rows = [numbers[i] for i, _ in runs]
    with create(retrained, RETRAINED, file_spec, software(code, "cpu", "torch", "numpy")) as writer:
        writer.matrix("masks", numbers, train.ids, dtype=np.uint8)[:] = np.stack(masks)
        writer.matrix("outputs", rows, targets.ids)[:] = values
        writer.matrix("predictions", rows, targets.ids, dtype=predictions.dtype)[:] = predictions


def _seeds(spec: RetrainedSpec, subset: int) -> list[int]:
    return [training_seed(spec.seed, subset, j) for j in range(spec.seeds)]


def _removals(
    study: Study,
    train: Split,
    spec: RetrainedSpec,
    named_by: Sequence[Path],
    naming: Mapping[str, Any],
) -> tuple[list[np.ndarray], list[int], list[str]]:
    """Return a mask of the training samples for each subset, sizes, and hashes of ``named_by``.

    Sizes are the numbers of removed samples, or of kept samples for a list of the kind ``select``.
    """
    n_train = len(train.ids)
    everything, all_rows = np.ones(n_train, dtype=bool), np.arange(n_train)
    if spec.subsets == "list":
        (listed,) = named_by
        rows, is_select = listed_rows(listed, train.ids), naming["kind"] == _SELECT
        sizes = sizes_of(naming["fractions"], n_train, len(rows), rounds_up=is_select)
        masks = [~np.isin(all_rows, rows[:size]) for size in sizes]
        masks += [random_removal(n_train, size, naming["draw"], spec.seed) for size in sizes]
        masks = [~mask for mask in masks] if is_select else masks
        return [everything, *masks], sizes, [file_digest(listed)]
    sizes = removed_sizes(spec.n_removed, n_train)
    if spec.subsets == "without random":
        draws = range(spec.draws)
        masks = [random_removal(n_train, n, draw, spec.seed) for n in sizes for draw in draws]
        return [everything, *masks], sizes, []
    scores, hashes = _target_scores(study, train, spec.subsets, named_by, naming)
    masks = []
    for of_target in scores:
        rows = np.argsort(-of_target, kind="stable")
        helpful = rows[of_target[rows] > 0]
        masks += [~np.isin(all_rows, helpful[:n]) for n in sizes]
    return masks, sizes, hashes


def _target_scores(
    study: Study, train: Split, subsets: str, named_by: Sequence[Path], naming: Mapping[str, Any]
) -> tuple[Sequence[np.ndarray], list[str]]:
    """Return the training samples' scores for each target, and hashes of the files of scores."""
    target_ids = naming["target_ids"]
    if subsets == "without bm25":
        return list(bm25_of_targets(study, train, target_ids)), []
    if subsets == "without embedding_cosine":
        spec = parse_spec(FeaturesSpec, naming["embeddings_spec"])
        files = read_directions(named_by, spec, naming["checkpoints"], train.ids, target_ids)
        cosines = [read(0, len(train.ids)) @ of_targets.T for read, of_targets in files]
        return np.mean(cosines, axis=0).T, embeddings_hashes(named_by)
    (scores,) = named_by
    with open_made_for(scores, SCORES, parse_spec(ScoresSpec, naming["scores_spec"])) as file:
        check_same("training samples", train.ids, file.index("scores"), file)
        values = file.matrix("scores")
        columns = positions(file.columns("scores"), target_ids)
        return [values[:, column] for column in columns], [file.content_hash]


def listed_rows(listed: Path, train_ids: Sequence[int | str]) -> np.ndarray:
    """Return the row numbers of a list's training samples, in the list's order, without repeats.

    The list may be empty, for example if there are no duplicates.
    """
    import pandas as pd  # Only lists need pandas.

    cells = pd.read_csv(listed, usecols=["id"], dtype=str, keep_default_na=False)["id"]
    row_of = {str(safe_cell(sample_id)): row for row, sample_id in enumerate(train_ids)}
    unknown = [cell for cell in cells if cell not in row_of]
    if unknown:
        raise InputError(
            f"{listed}: each id in the list must be the id of a training sample. Found "
            f"{unknown[0]}. Remove evaluation.removals.{listed.stem} from the config, or delete "
            "the list and run again.",
            code="stages.listed",
        )
    return np.array(list(dict.fromkeys(row_of[cell] for cell in cells)), dtype=np.int64)

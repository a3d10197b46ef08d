"""Retrain models on subsets of the training data, and write their outputs for all targets.

``docs/reference/files.md`` describes the arrays in the resulting file.
"""

from collections.abc import Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, ClassVar

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
# The kind of list whose samples are kept in retraining. The samples in other lists are left out.
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

    The study's ``train`` is called with the arguments ``seed`` and ``data``, besides others.

    ``spec.subsets`` says which subsets to use. ``naming`` contains the settings by which the
    removed samples are chosen, and ``named_by`` contains the files from which they are chosen. The
    possible values of ``spec.subsets`` are:

    - ``random``: The random subsets with the numbers ``first`` to ``last``. A subset and its seeds
      depend only on its number and ``spec.seed``.
    - ``without random``: First all samples. Then ``spec.draws`` subsets for each size, from which
      random samples are removed.
    - ``without top``: A subset for each of ``target_ids`` and each size, from which the samples
      with the largest scores for the target are removed. ``named_by`` contains a file of scores,
      and ``scores_spec`` its settings.
    - ``without bm25``: As ``without top``, but with BM25 scores of the study's texts.
    - ``without embedding_cosine``: As ``without top``, but with mean cosines of embeddings.
      ``named_by`` contains a file of embeddings for each of ``checkpoints``, and
      ``embeddings_spec`` their settings.
    - ``list``: First all samples. Then a subset for each size, from which the first samples in the
      list ``named_by`` are removed. Then a subset for each size, from which random samples are
      removed. Sizes are ``fractions`` of the training samples, but not larger than the list. If the
      ``kind`` of the list is select, models are trained only on the samples that are removed for
      other kinds. Each ``draw`` has another seed and other random samples.
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
        # All subsets have the same seeds, so that the effects of the seeds cancel in differences.
        is_list = spec.subsets == "list"
        common = [training_seed(spec.seed, 0, naming["draw"])] if is_list else _seeds(spec, 0)
        seeds = [common] * len(masks)
        file_spec |= naming_in_file(naming) | {"sizes": sizes, "named_by": hashes}
    targets = study.split(_TARGETS, None)
    runs = [(i, seed) for i, seeds_of_subset in enumerate(seeds) for seed in seeds_of_subset]
    results: list[tuple[np.ndarray, np.ndarray]] = []
    for run, _ in blocks_with_progress(len(runs), 1, "trainings"):
        i, seed = runs[run]
        # The annotation of Subset requires a Dataset, but an object with len() and [i] suffices.
        data = _TrainingSubset(train.samples, np.flatnonzero(masks[i]).tolist())  # pyright: ignore[reportArgumentType]
        # Processes that train() forks, such as the workers of a DataLoader, share this byte.
        _TrainingSubset.was_read = mmap(-1, 1)
        model = trained_model(study, {**spec.arguments, "seed": seed}, data)
        if not _TrainingSubset.was_read[0]:
            raise InputError(
                f"{study.path}: train() must train on its argument `data`, which contains the "
                "training samples of a subset. Found that train() does not read it, so models "
                "would not differ between subsets. Use `data` in place of all training samples.",
                code="study.train_data",
            )
        results.append(
            outputs_and_predictions(model, spec.model_output, train, targets, batch_size, study)
        )
    values, predictions = (np.stack(parts) for parts in zip(*results, strict=True))
    rows = [numbers[i] for i, _ in runs]
    with create(retrained, RETRAINED, file_spec, software(code, "cpu", "torch", "numpy")) as writer:
        writer.matrix("masks", numbers, train.ids, dtype=np.uint8)[:] = np.stack(masks)
        writer.matrix("outputs", rows, targets.ids)[:] = values
        writer.matrix("predictions", rows, targets.ids, dtype=predictions.dtype)[:] = predictions


class _TrainingSubset(Subset):
    """A subset of the training samples that sets ``was_read[0]`` to 1 when it is used."""

    was_read: ClassVar[mmap | bytearray] = bytearray(1)

    def __getattribute__(self, name: str) -> Any:
        # The methods for len() and [i] also read the attributes of the subset.
        _TrainingSubset.was_read[0] = 1
        return super().__getattribute__(name)


def _seeds(spec: RetrainedSpec, subset: int) -> list[int]:
    return [training_seed(spec.seed, subset, j) for j in range(spec.seeds)]


def _removals(
    study: Study,
    train: Split,
    spec: RetrainedSpec,
    named_by: Sequence[Path],
    naming: Mapping[str, Any],
) -> tuple[list[np.ndarray], list[int], list[str]]:
    """Choose the samples to remove for each value of ``spec.subsets`` (see ``retrain``).

    Returns:
        A mask for each model to train, which is True for the samples that are kept; the different
        numbers of samples that are removed, or kept for a list ``select``; and the hashes of the
        files ``named_by``.
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
    """Return the scores of all training samples for each target, and the hashes of ``named_by``."""
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
    """Return the row numbers that the samples in a list have in the training data.

    They are in the list's order. The row of a sample that is listed repeatedly occurs only once.
    The list may be empty, for example if no samples are duplicates.
    """
    import pandas as pd  # Only lists need pandas.

    cells = pd.read_csv(listed, usecols=["id"], dtype=str, keep_default_na=False)["id"]
    row_of = {str(safe_cell(sample_id)): row for row, sample_id in enumerate(train_ids)}
    unknown = [cell for cell in cells if cell not in row_of]
    if unknown:
        raise InputError(
            f"{listed}: each id in the list must be the id of a training sample. Found "
            f"{unknown[0]}. Delete the list and run again, or remove "
            f"evaluation.removals.{listed.stem} from the config.",
            code="stages.listed",
        )
    return np.array(list(dict.fromkeys(row_of[cell] for cell in cells)), dtype=np.int64)

"""Compute exact inner products of gradients, without a projection."""

from collections.abc import Sequence
from pathlib import Path

import torch

from trak_core.artifacts import selected_ids
from trak_core.attribution.device import Compute, find_device
from trak_core.attribution.inner_products import write_gramian
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.settings import TRAIN, FeaturesSpec
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study


def compute_gramian(
    *,
    gramian: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    targets: Sequence[int | str] | None = None,
    question: Path | None = None,
    selected: Sequence[Path] = (),
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Write the inner products of training gradients with each other, or with target gradients.

    The gradients are those of the model output. If ``spec.label_draws`` is positive, the file also
    contains inner products with gradients of the loss for labels that are drawn from the model's
    predictions, as ``inner_products`` documents.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    loaded = LoadedModel.of_study(study, checkpoint, spec, find_device(device))
    split, ids = spec.split or TRAIN, selected_ids(selected, spec) or targets
    write_gramian(
        gramian,
        loaded,
        study.split(TRAIN, None),
        spec,
        Compute(loaded.device, batch_size, memory_mb, threads),
        targets=None if split == TRAIN else split_of(study, split, ids, question),
        code=code,
    )

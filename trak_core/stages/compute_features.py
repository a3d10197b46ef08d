"""Compute and project the gradients of the samples in one split, with one checkpoint."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from trak_core.artifacts import selected_ids
from trak_core.attribution.device import Compute, find_device
from trak_core.attribution.gradient_method_record import recorded_method_for
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.write_features import write_features
from trak_core.settings import TRAIN, FeaturesSpec
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study


def compute_features(
    *,
    features: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    targets: Sequence[int | str] | None = None,
    question: Path | None = None,
    selected: Sequence[Path] = (),
    shard: int = 1,
    n_shards: int = 1,
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Write the features of all samples in a split, or of those in one of ``n_shards`` shards.

    ``shard`` is the number of the shard, counted from 1. ``n_shards`` changes the features only by
    float32 rounding.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    where = find_device(device, projects=True)
    method_of = partial(recorded_method_for, artifact=features, spec=spec, code=code)
    loaded = LoadedModel.of_study(study, checkpoint, spec, where)
    loaded = replace(loaded, method_of=method_of)
    data = split_of(study, spec.split or TRAIN, selected_ids(selected, spec) or targets, question)
    if loaded.scales is not None:
        print(f"Gradients are divided by the square root of the second moments in {checkpoint}")
    write_features(
        features,
        loaded,
        data,
        spec,
        Compute(where, batch_size, memory_mb, threads),
        shard=shard,
        n_shards=n_shards,
        code=code,
    )

"""Choose the way to per-sample gradients, once for all jobs of a study and its model."""

from pathlib import Path

import torch

from trak_core.attribution.batch_by_length import subset
from trak_core.attribution.chosen_ways import Ways, add_way, write_ways
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import projecting_device
from trak_core.spec import TRAIN, FeaturesSpec
from trak_core.study.study import Study


def choose_gradient_method(
    *,
    gradient_method: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    device: str,
    memory_mb: int,
    threads: int,
) -> None:
    """Compare ways to the gradients of a few training samples under one checkpoint.

    They are compared for two samples, the longest text and the shortest, and for the first one as
    a job of one sample has it, which needs no padding.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    loaded = LoadedModel.of_study(study, checkpoint, spec, projecting_device(device))
    train = study.split(TRAIN, None)
    ways: Ways = {}
    for part in (train, subset(train, [0])):
        (samples,) = loaded.ordered(part)
        own = loaded.in_pieces(samples, memory_mb)
        few, _ = own.few(samples)
        own.blocks.stop()
        with samples.naming_longest():
            own.memory(few, memory_mb)
        add_way(ways, own, few)
    for name, notice in ways.values():
        print(f"{name.replace('_', ' ')}{'' if notice is None else f': {notice}'}", flush=True)
    write_ways(gradient_method, spec, ways)

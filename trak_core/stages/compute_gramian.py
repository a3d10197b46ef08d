"""Compute inner products of gradients under one checkpoint, without a projection."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trak_core.artifacts import GRAMIAN, create, selected_ids
from trak_core.gradients import Variety
from trak_core.model.device import device_name, find_device, full_precision
from trak_core.model.inner_products import inner_products
from trak_core.model.loaded_model import LoadedModel
from trak_core.model.sample_outputs import write_columns
from trak_core.spec import TRAIN, FeaturesSpec
from trak_core.study.targets import split_of
from trak_core.system.progress import software


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
    """Compute K = J J^T of the training samples, or K_t = J J_t^T between them and targets.

    J are the gradients of the model output, which are never formed as a whole. Rows are training
    samples, columns the split's. Two blocks of ``batch_size`` samples are in the model at once, at
    most; ``memory_mb`` must hold the Gramian. A file of ``selected`` targets has their ids, in
    place of ``targets``.
    """
    torch.set_num_threads(threads)
    loaded = LoadedModel.load(study_file, checkpoint, spec, full_precision(find_device(device)))
    split = spec.split or TRAIN
    data = loaded.study.split(TRAIN, None)
    ids = selected_ids(selected, spec) or targets
    targets_split = None if split == TRAIN else split_of(loaded.study, split, ids, question)
    own = targets_split or data
    where = device_name(loaded.device)
    print(f"{split}: inner products of {len(data.ids)} x {len(own.ids)} gradients on {where}")
    values, columns = inner_products(loaded, data, targets_split, batch_size, memory_mb)
    variety = Variety()
    variety.add(values.T)
    is_train = split == TRAIN
    variety.check("training samples" if is_train else "targets", must_differ=is_train)
    file_spec = loaded.file_spec(spec, spec.projection)
    with create(gramian, GRAMIAN, file_spec, software(code, where, "torch", "numpy")) as writer:
        rows = writer.matrix("gramian", data.ids, own.ids, dtype=np.float64)
        rows[:] = values
        write_columns(writer, own.ids, columns, spec)

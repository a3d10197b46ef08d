"""Inner products of gradients under one checkpoint, without a projection."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trak_core.artifacts import GRAMIAN, create
from trak_core.config.budget import gramian_need
from trak_core.gradients import (
    Batch,
    SampleMemory,
    check_finite_gramian,
    check_labels,
    columns_of,
    in_chunks,
    in_evaluation_mode,
    refuse_not_finite,
    sample_memory,
    samples_that_fit,
)
from trak_core.gramian import cross_gramian, train_gramian
from trak_core.models.columns import write_columns
from trak_core.models.device import device_name, find_device, full_precision
from trak_core.models.loaded import LoadedModel
from trak_core.spec import FeaturesSpec
from trak_core.study.study import TRAIN, Split
from trak_core.system.progress import with_progress
from trak_core.system.software import software


def _looked_at(loaded: LoadedModel, split: Split) -> tuple[Batch, Batch, SampleMemory]:
    """Return all samples, their labels checked; a few of them; and what one takes in the model."""
    few, n_classes = loaded.few(split, 0, len(split.ids))
    samples = loaded.batch(split, 0, len(split.ids))
    check_labels(samples.labels, loaded.output, n_classes, split.ids)
    memory = sample_memory(loaded.model, loaded.parameters, loaded.output, few)
    # The engine never holds a sample's whole gradient, but that of one parameter at a time.
    largest = max(p.nbytes for p in loaded.parameters.values())
    return samples, few, replace(memory, gradient_bytes=largest)


def _at_once(
    loaded: LoadedModel, looks: Sequence[tuple[Batch, Batch, SampleMemory]], left_mb: int
) -> int:
    """Return how many samples fit beside what is held, once they are known not to mix."""
    inputs = [tensor.nbytes for samples, _, _ in looks for _, tensor in samples.tensors()]
    needed = max((memory for *_, memory in looks), key=lambda memory: memory.of(1))
    fit = samples_that_fit(needed, loaded.device, left_mb - sum(inputs) // 2**20)
    for _, few, _ in looks:
        loaded.check_apart(few, fit)
    return fit


def _blocks(samples: Batch, start: int, size: int) -> list[Batch]:
    stops = range(start, len(samples), size)
    return [samples.rows(slice(i, i + size)) for i in stops]


def _gramian(loaded: LoadedModel, train: Batch, targets: Batch | None, chunk: int) -> np.ndarray:
    """Return the Gramian, block of rows by block of rows; without targets, of train with itself."""
    what = loaded.model, loaded.parameters, loaded.output
    gramian = np.empty((len(train), len(train if targets is None else targets)))

    def fill(first: int, last: int) -> None:
        rows, size = train.rows(slice(first, last)), last - first
        if targets is not None:
            gramian[first:last] = cross_gramian(*what, [rows], _blocks(targets, 0, size))
            return
        gramian[first:last, first:last] = train_gramian(*what, [rows])
        if last < len(train):
            right = cross_gramian(*what, [rows], _blocks(train, last, size))
            gramian[first:last, last:] = right
            gramian[last:, first:last] = right.T

    for _ in with_progress(in_chunks(fill, len(train), chunk), len(train), "training samples"):
        pass
    return gramian


def compute_gramian(
    *,
    gramian: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    targets: Sequence[int | str] | None = None,
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Compute K = J J^T of the training samples, or K_t = J J_t^T between them and targets.

    J are the gradients of the model output, which are never formed as a whole. The numbers don't
    depend on ``batch_size``, ``memory_mb`` or ``threads``, to rounding of the model's precision.

    Args:
        gramian: The file to write: rows are training samples, columns the split's.
        checkpoint: File or folder with the weights.
        study_file: The study's Python file.
        spec: What decides the numbers: of one checkpoint and split.
        targets: Ids of the experiment's targets; None for the training samples.
        code: The stage's code digest.
        device: ``auto``, ``cpu`` or ``cuda``; see ``find_device``.
        batch_size: Two blocks of so many samples are in the model at once, at most.
        memory_mb: MiB for the Gramian, the samples, and on the CPU the activations; fewer samples
            at once if they don't fit. On CUDA its free memory counts for these.
        threads: For torch.

    Raises:
        InputError: If study, checkpoint or gradients are not what they must be, or if the Gramian
            exceeds the budget.
    """
    torch.set_num_threads(threads)
    loaded = LoadedModel.load(study_file, checkpoint, spec, full_precision(find_device(device)))
    split = spec.split or TRAIN
    data = loaded.study.split(TRAIN, None)
    own = data if split == TRAIN else loaded.study.split(split, targets)
    need = gramian_need(len(data.ids), len(own.ids))
    need.check(memory_mb)
    where = device_name(loaded.device)
    print(f"{split}: inner products of {len(data.ids)} x {len(own.ids)} gradients on {where}")
    looks = [_looked_at(loaded, part) for part in ([data] if split == TRAIN else [own, data])]
    samples, train = looks[0][0], looks[-1][0]
    fit = _at_once(loaded, looks, memory_mb - need.fixed_bytes // 2**20)
    # Two blocks are in the model at a time.
    chunk = max(1, min(batch_size, fit // 2))
    print(f"two times {chunk} samples at once", flush=True)
    parts = [columns_of(loaded.model, loaded.output, b) for b in _blocks(samples, 0, chunk)]
    outputs, *columns = (torch.cat(c) for c in zip(*parts, strict=True))
    if not outputs.isfinite().all():
        rows = (~outputs.isfinite()).nonzero().flatten().tolist()
        refuse_not_finite([own.ids[i] for i in rows], "Model outputs")
    with in_evaluation_mode(loaded.model):
        values = _gramian(loaded, train, None if split == TRAIN else samples, chunk)
    check_finite_gramian(values, data.ids, own.ids)
    numbers = torch.vmap(loaded.output.label_number)(samples.labels)
    file_spec = loaded.file_spec(spec, checkpoint, spec.projection)
    with create(gramian, GRAMIAN, file_spec, software(code, where, "torch", "numpy")) as writer:
        rows = writer.matrix("gramian", data.ids, own.ids, dtype=np.float64)
        rows[:] = values
        write_columns(writer, own.ids, [numbers, outputs, *columns], spec)

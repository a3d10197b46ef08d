"""Compute inner products of gradients under one checkpoint, without a projection."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import GRAMIAN, create, selected_ids
from trak_core.config.memory_needs import gramian_need
from trak_core.gradients import (
    Room,
    Variety,
    check_finite_gramian,
    check_labels,
    columns_of,
    in_chunks,
    in_evaluation_mode,
    refuse_not_finite,
)
from trak_core.gramian import cross_gramian, train_gramian
from trak_core.model.device import device_name, find_device, full_precision
from trak_core.model.length_order import OrderedSamples, StoredSamples
from trak_core.model.loaded_model import LoadedModel
from trak_core.model.sample_outputs import write_columns
from trak_core.spec import TRAIN, FeaturesSpec
from trak_core.study.targets import split_of
from trak_core.system.progress import software, with_progress


def _room(
    loaded: LoadedModel, splits: Sequence[tuple[OrderedSamples, StoredSamples]], left_mb: int
) -> Room:
    """Check all labels, and return how many samples fit beside what is held."""
    needs = []
    for samples, kept in splits:
        few, n_classes = loaded.few(samples)
        for part, sample_id in zip(kept.parts, kept.ids, strict=True):
            check_labels(part.labels, loaded.output, n_classes, [sample_id])
        needs.append((loaded.memory(few), samples, few))
    needed, samples, _ = max(needs, key=lambda need: (need[0].longest, need[0].of_longest.of(1)))
    # The engine never holds a sample's whole gradient, but that of one parameter at a time.
    largest = max(p.nbytes for p in loaded.parameters.values())
    needed = needed.mapped(lambda memory: replace(memory, gradient_bytes=largest))
    held = sum(kept.n_bytes for _, kept in splits)
    with samples.naming_longest():
        room = needed.room(loaded.device, left_mb - held // 2**20)
    for _, _, few in needs:
        loaded.check_apart(few, room.most(needed.longest))
    return room


def _gramian(
    loaded: LoadedModel,
    train: StoredSamples,
    targets: StoredSamples | None,
    at_once: Callable[[int], int],
) -> np.ndarray:
    """Return the Gramian, block of rows by block of rows; without targets, of train with itself."""
    model = loaded.model, loaded.parameters, loaded.output
    columns = train if targets is None else targets
    gramian = np.empty((len(train), len(columns)))

    def fill(first: int, last: int) -> None:
        rows, places = train.rows(slice(first, last)), train.places[first:last]
        if targets is None:
            gramian[np.ix_(places, places)] = train_gramian(*model, [rows])
        for numbers, block in columns.blocks(last if targets is None else 0, last - first):
            beside = columns.places[numbers]
            part = cross_gramian(*model, [rows], [block])
            gramian[np.ix_(places, beside)] = part
            if targets is None:
                gramian[np.ix_(beside, places)] = part.T

    n = len(train)
    for _ in with_progress(in_chunks(fill, n, at_once), n, "training samples"):
        pass
    return gramian


def _columns(
    loaded: LoadedModel, samples: OrderedSamples, kept: StoredSamples, at_once: Callable[[int], int]
) -> list[Tensor]:
    """Return label numbers, model outputs and what goes with them, in the study's order."""

    def of(first: int, last: int) -> list[Tensor]:
        block = kept.rows(slice(first, last))
        numbers = torch.vmap(loaded.output.label_number)(block.labels)
        return [numbers, *columns_of(loaded.model, loaded.output, block)]

    parts = [part for *_, part in samples.in_order(in_chunks(of, len(kept), at_once))]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


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
    own = data if split == TRAIN else split_of(loaded.study, split, ids, question)
    need = gramian_need(len(data.ids), len(own.ids))
    need.check(memory_mb)
    where = device_name(loaded.device)
    print(f"{split}: inner products of {len(data.ids)} x {len(own.ids)} gradients on {where}")
    ordered = loaded.ordered(*([data] if split == TRAIN else [own, data]))
    splits = [(samples, loaded.stored(samples)) for samples in ordered]
    (samples, kept), (train, rows) = splits[0], splits[-1]
    room = _room(loaded, splits, memory_mb - need.fixed_bytes // 2**20)
    longest = 0 if split == TRAIN else samples.length(0)

    def at_once(first: int) -> int:
        """Return how many training samples from one on may be beside as many of the others."""
        fit = room.most(max(longest, train.length(first)))
        # Two blocks are in the model at a time.
        return max(1, min(batch_size, fit // 2))

    print(f"two times {at_once(0)} samples at once", flush=True)
    columns = _columns(loaded, samples, kept, samples.batches_of(batch_size, room))
    bad = (~columns[1].isfinite()).nonzero().flatten().tolist()
    if bad:
        refuse_not_finite([own.ids[i] for i in bad], "Model outputs")
    with in_evaluation_mode(loaded.model):
        values = _gramian(loaded, rows, None if split == TRAIN else kept, at_once)
    check_finite_gramian(values, data.ids, own.ids)
    variety = Variety()
    variety.add(values.T)
    is_train = split == TRAIN
    variety.check("training samples" if is_train else "targets", must_differ=is_train)
    file_spec = loaded.file_spec(spec, spec.projection)
    with create(gramian, GRAMIAN, file_spec, software(code, where, "torch", "numpy")) as writer:
        rows = writer.matrix("gramian", data.ids, own.ids, dtype=np.float64)
        rows[:] = values
        write_columns(writer, own.ids, columns, spec)

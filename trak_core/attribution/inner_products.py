"""Compute inner products of gradients under one checkpoint, block by block."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import GRAMIAN, create, software
from trak_core.attribution.batch_by_length import OrderedSamples, StoredSamples
from trak_core.attribution.device import device_name
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import write_columns
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
from trak_core.spec import FeaturesSpec
from trak_core.study.dataset_split import Split
from trak_core.system.progress import log, with_progress


def write_gramian(
    path: Path,
    loaded: LoadedModel,
    data: Split,
    targets: Split | None,
    spec: FeaturesSpec,
    *,
    code: str,
    batch_size: int,
    memory_mb: int,
) -> None:
    """Write the inner products of training samples with each other, or with targets."""
    own, where = targets or data, device_name(loaded.device)
    log(f"{spec.split}: inner products of {len(data.ids)} x {len(own.ids)} gradients on {where}")
    values, columns = inner_products(loaded, data, targets, batch_size, memory_mb)
    variety = Variety()
    variety.add(values.T)
    variety.check("targets" if targets else "training samples", must_differ=targets is None)
    file_spec = loaded.file_spec(spec, spec.projection)
    with create(path, GRAMIAN, file_spec, software(code, where, "torch", "numpy")) as writer:
        rows = writer.matrix("gramian", data.ids, own.ids, dtype=np.float64)
        rows[:] = values
        write_columns(writer, own.ids, columns, spec)


def inner_products(
    loaded: LoadedModel, data: Split, targets: Split | None, batch_size: int, memory_mb: int
) -> tuple[np.ndarray, list[Tensor]]:
    """Return K = J J^T of the training samples, or K_t = J J_t^T between them and targets, float64.

    J are the gradients of the model output, which are never formed as a whole. Two blocks of
    ``batch_size`` samples are in the model at once, at most; ``memory_mb`` must hold the Gramian.
    With it are label numbers and ``PerSample.columns`` of the columns' samples.
    """
    own = data if targets is None else targets
    need = gramian_need(len(data.ids), len(own.ids))
    need.check(memory_mb)
    ordered = loaded.ordered(*([data] if targets is None else [own, data]))
    splits = [(samples, loaded.stored(samples)) for samples in ordered]
    (samples, kept), (train, rows) = splits[0], splits[-1]
    room = _room(loaded, splits, memory_mb - need.fixed_bytes // 2**20)
    longest = 0 if targets is None else samples.length(0)

    def at_once(first: int) -> int:
        """Return how many training samples from one on may be beside as many of the others."""
        fit = room.most(max(longest, train.length(first)))
        # Two blocks are in the model at a time.
        return max(1, min(batch_size, fit // 2))

    log(f"two times {at_once(0)} samples at once")
    columns = columns_in_order(loaded, samples, kept, samples.batches_of(batch_size, room))
    bad = (~columns[1].isfinite()).nonzero().flatten().tolist()
    if bad:
        refuse_not_finite([own.ids[i] for i in bad], "Model outputs")
    with in_evaluation_mode(loaded.model):
        values = _gramian(loaded, rows, None if targets is None else kept, at_once)
    check_finite_gramian(values, data.ids, own.ids)
    return values, columns


def _room(
    loaded: LoadedModel, splits: Sequence[tuple[OrderedSamples, StoredSamples]], left_mb: int
) -> Room:
    """Check all labels, and return how many samples fit beside what is held."""
    needs = []
    left_mb -= sum(kept.n_bytes for _, kept in splits) // 2**20
    for samples, kept in splits:
        few, n_classes = loaded.few(samples)
        for part, sample_id in zip(kept.parts, kept.ids, strict=True):
            check_labels(part.labels, loaded.output, n_classes, [sample_id])
        needs.append((loaded.memory(few, max(0, left_mb)), samples, few))
    needed, samples, _ = max(needs, key=lambda need: (need[0].longest, need[0].of_longest.of(1)))
    # The engine never holds a sample's whole gradient, but that of one parameter at a time.
    largest = max(p.nbytes for p in loaded.parameters.values())
    needed = needed.mapped(lambda memory: replace(memory, gradient_bytes=largest))
    with samples.naming_longest():
        room = needed.room(loaded.device, left_mb)
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


def columns_in_order(
    loaded: LoadedModel, samples: OrderedSamples, kept: StoredSamples, at_once: Callable[[int], int]
) -> list[Tensor]:
    """Return label numbers, model outputs and what goes with them, in the study's order."""

    def of(first: int, last: int) -> list[Tensor]:
        block = kept.rows(slice(first, last))
        numbers = torch.vmap(loaded.output.label_number)(block.labels)
        return [numbers, *columns_of(loaded.model, loaded.output, block)]

    parts = [part for *_, part in samples.in_order(in_chunks(of, len(kept), at_once))]
    return [torch.cat(column) for column in zip(*parts, strict=True)]

"""Compute inner products of the gradients of one checkpoint, in blocks of samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import GRAMIAN, create, software
from trak_core.attribution.batch_by_length import StoredSamples
from trak_core.attribution.device import device_name
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import write_columns
from trak_core.config.memory_needs import gramian_need
from trak_core.gradients import (
    MemoryBudget,
    Variety,
    check_finite_gramian,
    columns_of,
    in_chunks,
    in_evaluation_mode,
    refuse_not_finite,
)
from trak_core.gramian import cross_gramian, train_gramian
from trak_core.runtime.progress import log, with_progress
from trak_core.settings import FeaturesSpec
from trak_core.study.dataset_split import Split


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
    """Return K = J J^T of the training samples, or K_t = J J_t^T with targets, float64.

    J is the matrix of gradients of the model output, which is never formed. At most two blocks of
    ``batch_size`` samples are in the model at once. The Gramian must fit into ``memory_mb``. The
    second result has label numbers and ``PerSample.columns`` for the columns of the Gramian.
    """
    need = gramian_need(len(data.ids), len((targets or data).ids))
    need.check(memory_mb)
    splits = [data] if targets is None else [targets, data]
    stored = [loaded.stored(samples) for samples in loaded.ordered(*splits)]
    others, train = stored[0], stored[-1]
    room = _room(loaded, stored, memory_mb - need.fixed_bytes // 2**20)
    longest = 0 if targets is None else others.samples.length(0)

    def at_once(first: int) -> int:
        """Return the number of samples in a block. Two blocks are in the model at once."""
        fit = room.most(max(longest, train.samples.length(first)))
        return max(1, min(batch_size, fit // 2))

    log(f"two times {at_once(0)} samples at once")
    columns = columns_in_order(loaded, others, (targets or data).ids, batch_size, room)
    with in_evaluation_mode(loaded.model):
        values = _gramian(loaded, train, None if targets is None else others, at_once)
    check_finite_gramian(values, data.ids, (targets or data).ids)
    return values, columns


def _room(loaded: LoadedModel, stored: Sequence[StoredSamples], left_mb: int) -> MemoryBudget:
    """Check all labels, and return the memory budget of batches."""
    left_mb -= sum(samples.n_bytes for samples in stored) // 2**20
    fews = [loaded.few_checked(samples) for samples in stored]
    needs = [loaded.memory(few, max(0, left_mb)) for few in fews]
    largest = max(range(len(needs)), key=lambda i: (needs[i].longest, needs[i].of_longest.of(1)))
    # At any time, the engine forms the gradients of one parameter only.
    gradient_bytes = max(p.nbytes for p in loaded.parameters.values())
    needed = needs[largest].mapped(lambda memory: replace(memory, gradient_bytes=gradient_bytes))
    with stored[largest].samples.naming_longest():
        room = needed.room(loaded.device, left_mb)
    for few in fews:
        loaded.check_apart(few, room.most(needed.longest))
    return room


def _gramian(
    loaded: LoadedModel,
    train: StoredSamples,
    targets: StoredSamples | None,
    at_once: Callable[[int], int],
) -> np.ndarray:
    """Return K_t, or K without targets, computed in blocks, in the study's order."""
    model = loaded.model, loaded.parameters, loaded.output
    others = train if targets is None else targets
    gramian = np.empty((len(train), len(others)))

    def fill(first: int, last: int) -> None:
        block, rows = train.rows(first, last), train.samples.rows[first:last]
        if targets is None:
            gramian[np.ix_(rows, rows)] = train_gramian(*model, [block])
        for start in range(last if targets is None else 0, len(others), last - first):
            stop = start + last - first
            columns = others.samples.rows[start:stop]
            part = cross_gramian(*model, [block], [others.rows(start, stop)])
            gramian[np.ix_(rows, columns)] = part
            if targets is None:
                gramian[np.ix_(columns, rows)] = part.T

    n = len(train)
    for _ in with_progress(in_chunks(fill, n, at_once), n, "training samples"):
        pass
    return gramian


def columns_in_order(
    loaded: LoadedModel,
    stored: StoredSamples,
    ids: Sequence[object],
    batch_size: int,
    room: MemoryBudget,
) -> list[Tensor]:
    """Return label numbers and ``PerSample.columns`` in the study's order, the order of ``ids``.

    Model outputs must be finite.
    """

    def of(first: int, last: int) -> list[Tensor]:
        block = stored.rows(first, last)
        numbers = torch.vmap(loaded.output.label_number)(block.labels)
        return [numbers, *columns_of(loaded.model, loaded.output, block)]

    samples = stored.samples
    chunks = in_chunks(of, len(stored), samples.batches_of(batch_size, room))
    parts = [part for *_, part in samples.in_order(chunks)]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    bad = (~columns[1].isfinite()).nonzero().flatten().tolist()
    if bad:
        refuse_not_finite([ids[i] for i in bad], "Model outputs")
    return columns

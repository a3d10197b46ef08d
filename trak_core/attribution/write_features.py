"""Compute the features of samples for one checkpoint, in memory or in a file."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue] -- made at run time
from torch import Tensor

from trak_core.artifacts import FEATURE_SHARD, FEATURES, create, software
from trak_core.attribution.device import Compute, device_name
from trak_core.attribution.label_draws import LabelDraws
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import (
    QueuedFeatures,
    compilers,
    queued_features,
    stored_rows,
)
from trak_core.attribution.sample_outputs import write_columns
from trak_core.attribution.solve import fill_upper
from trak_core.dependency_digests import content_digest
from trak_core.gradients import Batch, Variety, in_chunks
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.runtime.progress import log, with_progress
from trak_core.settings import TRAIN, FeaturesSpec, ProjectionSpec, projection_of
from trak_core.study.dataset_split import Split

# Texts are sorted by length within windows of consecutive texts. A window contains at least
# _LEAST_WINDOW texts. The features of a larger window fit into _WINDOW_BYTES.
_WINDOW_BYTES, _LEAST_WINDOW = 2**24, 256


def projection_for(loaded: LoadedModel, spec: FeaturesSpec) -> ProjectionSpec:
    """Return the settings of the projection that is applied to a checkpoint's gradients."""
    return projection_of(spec, [p.shape for p in loaded.parameters.values()])


@dataclass(slots=True)
class SampledNormal:
    """The normal matrix N = 1/S sum_i sum_s phi_is phi_is^T of samples i and S drawn labels s.

    phi_is = scale R^T B_i^T z_is is the gradient for a drawn label (see ``LabelDraws.drawn``),
    projected by R. The expectation of N, shape (k, k), is scale^2 R^T G R, where G is the
    Gauss-Newton matrix of the training loss. G is the Fisher matrix if the loss is minus the
    log-probability of the label.

    Source: Martens, "New Insights and Perspectives on the Natural Gradient Method", JMLR 2020,
        sections 5 and 9.

    ``total`` is the sum of the terms so far, float64. Only the lower triangle is filled.
    """

    projection: ProjectionSpec
    n_draws: int
    total: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        k = self.projection.proj_dim
        self.total = np.zeros((k, k), order="F")

    @property
    def draws(self) -> LabelDraws:
        return LabelDraws(self.n_draws, self.projection.stream, self.projection.seed)

    def add(self, phi: Sequence[Tensor]) -> None:
        """Add the terms of a batch. ``phi`` contains the projected gradients of each draw."""
        rows = torch.cat(list(phi)).double().numpy()
        # The sum is column-major, so that BLAS adds to it without a copy.
        dsyrk(1 / self.n_draws, rows.T, beta=1.0, c=self.total, lower=1, overwrite_c=1)

    def matrix(self) -> np.ndarray:
        """Return N, float64, exactly symmetric. Call this last, because it changes ``total``."""
        fill_upper(self.total)
        return self.total


def feature_blocks(
    loaded: LoadedModel,
    data: Split,
    spec: FeaturesSpec,
    compute: Compute,
    *,
    must_differ: bool,
    sampled: SampledNormal | None = None,
) -> Iterator[tuple[int, int, np.ndarray, list[Tensor]]]:
    """Yield features phi = scale R^T g in the order of the samples, one block at a time.

    g is the gradient of a sample's model output, shape (p,), and R is the projection matrix. With
    ``must_differ``, an error is raised if all features are equal. If ``sampled`` is given, the
    terms for drawn labels are added to it.

    Yields:
        Start and stop of the block; features, shape (rows, k), rounded to their stored dtype; and a
        list of the labels as numbers and of ``PerSample.columns``, shape (rows,) each.

    Source: Park et al., "TRAK", ICML 2023, section 3.2.
    """
    projection, memory_mb = projection_for(loaded, spec), compute.memory_mb
    # The features of a window are in memory until they can be yielded in the original order.
    window = max(_LEAST_WINDOW, _WINDOW_BYTES // (4 * projection.proj_dim))
    (samples,) = loaded.ordered(data, window=window)
    if sampled is None:
        loaded = loaded.in_pieces(samples, memory_mb)
    few, n_classes = loaded.few(samples)
    needed = loaded.memory(few, memory_mb)
    if sampled is not None:
        more = sampled.draws.bytes_of_sample(loaded, few)
        needed = needed.mapped(lambda m: replace(m, activation_bytes=m.activation_bytes + more))
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    chunk = min(compute.batch_size, room.most(needed.longest))
    loaded.check_apart(few, chunk)
    method = loaded.method_of(loaded, few)
    chunk_mb = needed.of_longest.bytes_of(chunk) / 2**20
    log(f"{chunk} samples at once, about {chunk_mb:.3g} MiB together")

    def project(output: ModelOutput, batch: Batch, ids: Sequence[object]) -> QueuedFeatures:
        given = loaded.model, loaded.parameters, output, batch
        return queued_features(method, *given, projection, ids, compute.threads, loaded.scales)

    def queued(first: int, last: int) -> QueuedFeatures:
        batch, ids = loaded.checked(samples, first, last, n_classes), samples.split.ids[first:last]
        features = project(loaded.output, batch, ids)
        if sampled is not None:
            drawn = sampled.draws.drawn(loaded, batch, ids)
            sampled.add([project(*labelled, ids).wait()[0] for labelled in drawn])
        return features

    variety, n = Variety(), len(data.ids)
    chunks = _awaited(in_chunks(queued, n, samples.batches_of(compute.batch_size, room)))
    for first, last, (exact, *columns) in samples.in_order(with_progress(chunks, n, "samples")):
        variety.add(exact.numpy())
        yield first, last, stored_rows(exact.numpy(), spec.dtype, data.ids[first:last]), columns
    variety.check("training samples" if spec.split == TRAIN else "targets", must_differ=must_differ)


def _awaited(
    chunks: Iterable[tuple[int, int, QueuedFeatures]],
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield start, stop and tensors of each batch, while a GPU already computes the next batch."""
    queue: deque[tuple[int, int, QueuedFeatures]] = deque()
    for chunk in chunks:
        queue.append(chunk)
        if len(queue) > 1 or chunk[2].event is None:
            start, stop, features = queue.popleft()
            tensors = features.wait()
            del features  # It keeps the inputs of the batch in the device's memory.
            yield start, stop, tensors
    for start, stop, features in queue:
        yield start, stop, features.wait()


def write_features(
    path: Path,
    loaded: LoadedModel,
    data: Split,
    spec: FeaturesSpec,
    compute: Compute,
    *,
    code: str,
    shard: int = 1,
    n_shards: int = 1,
) -> None:
    """Write the features of the samples in shard number ``shard`` (from 1) of ``n_shards``."""
    start, stop = (len(data.ids) * i // n_shards for i in (shard - 1, shard))
    projection = projection_for(loaded, spec)
    file_spec = loaded.file_spec(spec, projection.scaled())
    if n_shards > 1:
        file_spec["shard"] = {
            "rows": [start, stop],
            "number": shard,
            "of": n_shards,
            "made_of": {"samples": len(data.ids), "ids": content_digest(data.ids)},
        }
    where = device_name(loaded.device)
    log(
        f"{spec.split}: samples {start} to {stop} of {len(data.ids)}, {projection.n_params} "
        f"parameters to {projection.proj_dim} dimensions ({projection.kind}"
        f"{'' if 'kind' in spec.projection else ', the default'}), gradients on {where}"
    )
    own = data.select(range(start, stop))
    sampled = SampledNormal(projection, spec.label_draws) if spec.label_draws else None
    left_mb = compute.memory_mb - (0 if sampled is None else sampled.total.nbytes // 2**20)
    blocks = feature_blocks(
        loaded,
        own,
        spec,
        replace(compute, memory_mb=max(0, left_mb)),
        sampled=sampled,
        # Equal features of all training samples are an error. A shard may contain only few samples,
        # whose features can be equal.
        must_differ=spec.split == TRAIN and n_shards == 1,
    )
    kind = FEATURES if n_shards == 1 else FEATURE_SHARD
    provenance = software(code, where, "torch", "numpy", *compilers(loaded.device))
    kept: list[Tensor] = []
    with create(path, kind, file_spec, provenance) as writer:
        names = range(projection.proj_dim)
        rows = writer.matrix("features", own.ids, names, dtype=np.dtype(spec.dtype))
        for first, last, stored, columns in blocks:
            rows[first:last] = stored
            # A list of small tensors would fragment memory, so columns are copied into large ones.
            kept = kept or [column.new_empty(len(own.ids)) for column in columns]
            for i, part in enumerate(columns):
                # The labels of one batch can be integers although other batches contain fractions.
                kept[i] = kept[i].to(torch.promote_types(kept[i].dtype, part.dtype))
                kept[i][first:last] = part
        write_columns(writer, own.ids, kept, spec)
        if sampled is not None:
            matrix = writer.matrix("sampled_normal", names, names, dtype=np.float64)
            matrix[:] = sampled.matrix()

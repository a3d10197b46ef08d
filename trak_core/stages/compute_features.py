"""Project the per-sample gradients of one split under one checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import FEATURE_SHARD, FEATURES, create, selected_ids, software
from trak_core.attribution.batch_by_length import subset
from trak_core.attribution.chosen_ways import chosen_way, read_ways
from trak_core.attribution.device import device_name
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import (
    batch_features,
    compilers,
    projecting_device,
    stored_rows,
)
from trak_core.attribution.sample_outputs import write_columns
from trak_core.dependency_digests import content_digest
from trak_core.gradients import Variety, check_labels, in_chunks
from trak_core.spec import TRAIN, FeaturesSpec, projection_of
from trak_core.study.dataset_split import with_flipped_labels
from trak_core.study.read_targets import split_of
from trak_core.system.progress import with_progress

# Texts are ordered by length within a window: its size in bytes of features, and in texts at least.
_WINDOW_BYTES, _LEAST_WINDOW = 2**24, 256


def compute_features(
    *,
    features: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    gradient_method: Path | None = None,
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
    """Fold gradients and projection over the samples of one split, or of one shard of it.

    Shards count from 1 to ``n_shards``, on which the numbers don't depend, to float32 rounding. A
    file of ``selected`` targets has their ids, in place of ``targets``.
    """
    torch.set_num_threads(threads)
    loaded = LoadedModel.load(study_file, checkpoint, spec, projecting_device(device))
    parameters = loaded.parameters
    split = spec.split or TRAIN
    data = split_of(loaded.study, split, selected_ids(selected, spec) or targets, question)
    if spec.flipped is not None:
        data = with_flipped_labels(data, **spec.flipped)
    start, stop = (len(data.ids) * i // n_shards for i in (shard - 1, shard))
    if loaded.scales is not None:
        print(f"Gradients are divided by the root of the second moments in {checkpoint}")
    projection = projection_of(spec, [p.shape for p in parameters.values()])
    file_spec = loaded.file_spec(spec, projection.scaled())
    if n_shards > 1:
        made_of = {"samples": len(data.ids), "ids": content_digest(data.ids)}
        own = {"rows": [start, stop], "number": shard, "of": n_shards}
        file_spec["shard"] = own | {"made_of": made_of}
    kind = FEATURES if n_shards == 1 else FEATURE_SHARD
    where = device_name(loaded.device)
    print(
        f"{split}: samples {start} to {stop} of {len(data.ids)}, {projection.n_params} parameters "
        f"to {projection.proj_dim} dimensions ({projection.kind}"
        f"{'' if 'kind' in spec.projection else ', by their number'}), gradients on {where}",
        flush=True,
    )
    # Features of one window are in memory before they are written in the study's order.
    window = max(_LEAST_WINDOW, _WINDOW_BYTES // (4 * projection.proj_dim))
    (samples,) = loaded.ordered(subset(data, range(start, stop)), window=window)
    loaded = loaded.in_pieces(samples, memory_mb)
    model, output = loaded.model, loaded.output
    few, n_classes = loaded.few(samples)
    needed = loaded.memory(few, memory_mb)
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    chunk = min(batch_size, room.most(needed.longest))
    loaded.check_apart(few, chunk)
    method = chosen_way(loaded, few, read_ways(gradient_method, spec))
    taken = needed.of_longest.of(chunk) / 2**20
    print(f"{chunk} samples at once, about {taken:.3g} MiB together", flush=True)
    if samples.lengths is not None:
        most = min(batch_size, room.most(needed.shortest))
        lengths = f"{needed.shortest} to {needed.longest} tokens"
        print(f"texts of {lengths}: {most} of the shortest at once", flush=True)

    def computed(first: int, last: int) -> list[Tensor]:
        """Return the features of some samples to be stored, and what goes with each sample."""
        batch, ids = loaded.batch(samples, first, last), samples.split.ids[first:last]
        check_labels(batch.labels, output, n_classes, ids)
        given = model, parameters, output, batch
        rows, columns = batch_features(method, *given, projection, ids, threads, loaded.scales)
        return [torch.from_numpy(rows), *(column.cpu() for column in columns)]

    kept: list[Tensor] = []
    variety = Variety()
    ids = data.ids[start:stop]
    provenance = software(code, where, "torch", "numpy", *compilers(loaded.device))
    with create(features, kind, file_spec, provenance) as writer:
        names = range(projection.proj_dim)
        rows = writer.matrix("features", ids, names, dtype=np.dtype(spec.dtype))
        chunks = in_chunks(computed, len(ids), samples.batches_of(batch_size, room))
        done = with_progress(chunks, len(ids), "samples")
        for first, last, (exact, *columns) in samples.in_order(done):
            rows[first:last] = stored_rows(exact.numpy(), spec.dtype, ids[first:last])
            variety.add(exact.numpy())
            # Not a list of parts: small tensors that stay between large ones that go waste memory.
            kept = kept or [column.new_empty(len(ids)) for column in columns]
            for whole, part in zip(kept, columns, strict=True):
                whole[first:last] = part
        # A few that are alike may share a shard.
        variety.check(
            "training samples" if split == TRAIN else "targets",
            must_differ=split == TRAIN and n_shards == 1,
        )
        write_columns(writer, ids, kept, spec)

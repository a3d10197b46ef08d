"""How far the projection keeps norms and inner products of gradients under one checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trak_core.artifacts import DISTORTION, Writer, create
from trak_core.config.budget import DISTORTION_SAMPLES, DISTORTION_STREAMS, distortion_need
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    SampleMemory,
    check_finite_gramian,
    check_labels,
    gradient_method,
    in_evaluation_mode,
    n_params,
)
from trak_core.gramian import train_gramian
from trak_core.model.device import device_name, full_precision
from trak_core.model.features import compilers, projecting_device
from trak_core.model.load import LoadedModel
from trak_core.model.sample_order import OrderedSamples, StoredSamples
from trak_core.model.sampled import SampledGradients
from trak_core.spec import FeaturesSpec, projection_of
from trak_core.study.study import TRAIN, Split
from trak_core.system.software import software
from trak_core.trust.distortion import (
    Agreement,
    inner_product_agreement,
    inner_product_sd,
    inner_products,
    squared_norm_agreement,
)

# Of the draw of samples.
_SEED = 0


def _drawn(data: Split, n: int) -> Split:
    """Draw n samples uniformly and in their order, the same ones under every checkpoint."""
    order = torch.randperm(len(data.ids), generator=torch.Generator().manual_seed(_SEED))
    return data.take([data.ids[i] for i in sorted(order[:n].tolist())])


def _room(
    loaded: LoadedModel, samples: OrderedSamples, few: Batch, batch_size: int, left_bytes: int
) -> tuple[int, int]:
    """Return how many samples to differentiate at once, and whole gradients to keep beside them."""
    kept_bytes = 4 * n_params(loaded.parameters)
    one = loaded.memory(few)
    # Two copies of a batch's whole gradients, and one that is kept.
    formed, beside = (
        one.mapped(
            lambda memory, copies=copies: SampleMemory(
                memory.activation_bytes + copies * kept_bytes, 0
            )
        )
        for copies in (2, 3)
    )
    with samples.naming_longest():
        room = beside.room(loaded.device, max(0, left_bytes // 2**20))
    chunk = min(batch_size, room.most(one.longest))
    in_work = formed.of_longest.of(chunk) if loaded.device.type == "cpu" else 0
    return chunk, max(1, (left_bytes - in_work) // kept_bytes)


def _gramian(loaded: LoadedModel, samples: StoredSamples, chunk: int) -> np.ndarray:
    """Return the exact inner products of gradients, by the engine."""
    half = max(1, chunk // 2)  # two blocks are in the model at a time
    blocks = [block for _, block in samples.blocks(0, half)]
    with in_evaluation_mode(loaded.model):
        gramian = train_gramian(loaded.model, loaded.parameters, loaded.output, blocks)
    check_finite_gramian(gramian, samples.ids, samples.ids)
    return gramian


def _not_zero(gramian: np.ndarray, ids: Sequence[object]) -> np.ndarray:
    """Return the positions of gradients that aren't zero: no error is relative to 0."""
    positive = np.diagonal(gramian) > 0
    zero = [str(ids[i]) for i in np.flatnonzero(~positive).tolist()]
    if len(ids) - len(zero) < 2:
        raise InputError(
            "Measuring distortion needs at least two samples whose gradients aren't zero. Found "
            f"{len(ids) - len(zero)} among the {len(ids)} drawn. Leave `distortion` out."
        )
    if zero:
        print(
            f"Notice: left out {len(zero)} of {len(ids)} samples, whose gradients are zero: "
            f"{', '.join(zero[:8])}{' and more' if len(zero) > 8 else ''}.",
            flush=True,
        )
    return np.flatnonzero(positive)


def _write(
    writer: Writer, key: str, index: Sequence[Any], columns: Sequence[Any], values: np.ndarray
) -> None:
    writer.matrix(key, index, columns, dtype=np.float64)[:] = values


def _write_agreements(writer: Writer, found: dict[str, Agreement], streams: list[int]) -> None:
    """Write what was measured beside what was predicted, and each stream's errors; print both."""
    kinds, columns = list(found), ["measured", "standard_error", "predicted"]
    numbers = np.array([(a.measured, a.standard_error, a.predicted) for a in found.values()])
    _write(writer, "agreement", kinds, columns, numbers)
    by_stream = np.transpose([a.by_stream for a in found.values()])
    _write(writer, "by_stream", streams, kinds, by_stream)
    for kind, (measured, error, predicted) in zip(kinds, numbers, strict=True):
        print(f"{kind}: error {measured:.3g} +- {error:.2g}, predicted {predicted:.3g}", flush=True)


def compute_distortion(
    *,
    distortion: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
    most_samples: int = DISTORTION_SAMPLES,
    n_streams: int = DISTORTION_STREAMS,
) -> None:
    """Compare squared norms and inner products of projected gradients with the exact ones.

    The training samples are the same for every checkpoint, so that checkpoints differ by their
    gradients alone; those with a zero gradient are left out. Each stream is a projection matrix.
    The numbers don't depend on ``batch_size``, ``memory_mb`` or ``threads``, to rounding.

    Args:
        distortion: The file to write.
        checkpoint: File or folder with the weights.
        study_file: The study's Python file.
        spec: What decides the numbers: of one checkpoint's training samples.
        code: The stage's code digest.
        device: ``auto``, ``cpu`` or ``cuda``, for gradients and projection.
        batch_size: Samples differentiated at once, at most.
        memory_mb: MiB for all arrays; on CUDA the gradients and activations in work may take its
            free memory instead.
        threads: For torch and the projection.
        most_samples: Training samples to compare, fewer if there are fewer.
        n_streams: Projection matrices to compare with: the checkpoint's own, and those of the
            stream numbers that follow it. Standard errors run over them.

    Raises:
        InputError: If study, checkpoint or gradients are not what they must be, if fewer than two
            gradients aren't zero, or if the budget doesn't hold it.
    """
    torch.set_num_threads(threads)
    where = full_precision(projecting_device(device))
    loaded = LoadedModel.load(study_file, checkpoint, spec, where)
    size = n_params(loaded.parameters)
    shapes = [parameter.shape for parameter in loaded.parameters.values()]
    projections = [projection_of(spec, shapes, i) for i in range(n_streams)]
    own, streams = projections[0], [p.stream for p in projections]
    train = loaded.study.split(TRAIN, None)
    n_drawn = min(most_samples, len(train.ids))
    need = distortion_need(n_drawn, own.proj_dim, n_streams)
    need.check(memory_mb)
    where = device_name(loaded.device)
    print(f"{n_drawn} training samples, {size} parameters, {n_streams} streams on {where}")
    data = _drawn(train, n_drawn)
    (samples,) = loaded.ordered(data)
    few, n_classes = loaded.few(samples)
    kept = loaded.stored(samples)
    for part, sample_id in zip(kept.parts, kept.ids, strict=True):
        check_labels(part.labels, loaded.output, n_classes, [sample_id])
    left_bytes = memory_mb * 2**20 - need.fixed_bytes - kept.n_bytes
    chunk, held = _room(loaded, samples, few, batch_size, left_bytes)
    loaded.check_apart(few, chunk)
    gramian = _gramian(loaded, kept, chunk)
    rows = _not_zero(gramian, kept.ids)
    method = gradient_method(loaded.model, loaded.parameters, loaded.output, few)
    gradients = SampledGradients(loaded, kept.take(rows.tolist()), method, chunk)
    features = gradients.features(projections, threads)
    peaks = np.zeros((len(rows), len(rows)))
    if own.lossless_block is not None:
        peaks = gradients.peakedness(own, held)
    # From the order of computing to that of the study.
    back = np.argsort(kept.places[rows])
    rows, features, peaks = rows[back], features[:, back], peaks[np.ix_(back, back)]
    gramian, ids = gramian[np.ix_(rows, rows)], [kept.ids[i] for i in rows.tolist()]
    predicted_sd = inner_product_sd(own.proj_dim, gramian, peaks)
    found = {
        "squared_norm": squared_norm_agreement(gramian, list(features), predicted_sd),
        "inner_product": inner_product_agreement(gramian, list(features), predicted_sd),
    }
    file_spec = {
        **loaded.file_spec(spec, checkpoint, own.scaled()),
        "sample": {"drawn": n_drawn, "seed": _SEED},
        "streams": n_streams,
    }
    provenance = software(code, where, "torch", "numpy", *compilers(loaded.device))
    counts = {"n_streams": n_streams, "n_zero_gradients": n_drawn - len(ids)}
    with create(distortion, DISTORTION, file_spec, provenance, **counts) as writer:
        _write_agreements(writer, found, streams)
        _write(writer, "gramian", ids, ids, gramian)
        _write(writer, "predicted_sd", ids, ids, predicted_sd)
        _write(writer, "projected_gramian", ids, ids, inner_products(features[0]))
        squared_norms = np.einsum("sij,sij->is", features, features, dtype=np.float64)
        _write(writer, "projected_squared_norms", ids, streams, squared_norms)
        writer.vector("sample_ids", ids)

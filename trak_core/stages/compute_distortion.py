"""Measure how far the projection keeps norms and inner products of gradients of one checkpoint."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from trak_core.artifacts import DISTORTION, create, software
from trak_core.attribution.batch_by_length import OrderedSamples, StoredSamples
from trak_core.attribution.chosen_ways import kept_way
from trak_core.attribution.device import device_name, full_precision
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import Features, compilers, projecting_device
from trak_core.config.memory_needs import DISTORTION_SAMPLES, DISTORTION_STREAMS, distortion_need
from trak_core.errors import InputError, listed
from trak_core.evaluation.distortion import agreement, inner_products, product_variances
from trak_core.gradients import (
    Batch,
    GradientMethod,
    SampleMemory,
    check_finite_gramian,
    check_labels,
    formed_gradients,
    in_chunks,
    n_params,
)
from trak_core.spec import TRAIN, FeaturesSpec, ProjectionSpec, projection_of
from trak_core.study.dataset_split import Split
from trak_core.study.study import Study
from trak_core.system.progress import with_progress

_SEED = 0  # draws the samples


def _drawn(data: Split, n: int) -> Split:
    """Draw n samples uniformly and in their order, the same ones under every checkpoint."""
    order = torch.randperm(len(data.ids), generator=torch.Generator().manual_seed(_SEED))
    return data.take([data.ids[i] for i in sorted(order[:n].tolist())])


def _at_once(loaded: LoadedModel, samples: OrderedSamples, few: Batch, left_bytes: int) -> int:
    """Return how many samples to differentiate at once: their gradients are there three times."""
    copies_bytes = 3 * 4 * n_params(loaded.parameters)
    memory = loaded.memory(few, max(0, (left_bytes - copies_bytes) // 2**20))
    formed = memory.mapped(lambda sample: SampleMemory(sample.activation_bytes + copies_bytes, 0))
    with samples.naming_longest():
        return formed.room(loaded.device, max(0, left_bytes // 2**20)).most(memory.longest)


def compare_gradients(
    loaded: LoadedModel,
    samples: StoredSamples,
    method: GradientMethod,
    projections: Sequence[ProjectionSpec],
    at_once: int,
    threads: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inner products of n gradients, their variances under the projection, and features.

    Inner products and variances have shape (n, n), float64; scaled features have shape
    (len(projections), n, k), float32. Gradients are computed again for every block of ``at_once``
    others. An ``InputError`` names samples whose gradients are not finite.
    """
    model = loaded.model, loaded.parameters, loaded.output
    n = len(samples)
    gramian, variances = np.empty((n, n)), np.empty((n, n))
    features = np.empty((len(projections), n, projections[0].proj_dim), np.float32)

    def gradients(start: int) -> Iterator[tuple[int, int, np.ndarray]]:
        def formed(first: int, last: int) -> np.ndarray:
            batch = samples.rows(slice(start + first, start + last))
            blocks = formed_gradients(method, *model, batch).blocks()
            return np.concatenate([block.float().cpu().numpy() for block in blocks], axis=1)

        for first, last, rows in in_chunks(formed, n - start, at_once):
            yield start + first, start + last, rows

    for start, stop, x in with_progress(gradients(0), n, "samples compared"):
        own = slice(start, stop)
        check_finite_gramian(inner_products(x, x), samples.ids[own], samples.ids[own])
        for first, last, y in chain([(start, stop, x)], gradients(stop)):
            parts = inner_products(x, y), product_variances(x, y, projections[0])
            for pairs, part in zip((gramian, variances), parts, strict=True):
                pairs[own, first:last], pairs[first:last, own] = part, part.T
        sums = Features.zeros(loaded.parameters, projections, stop - start, threads)
        method(*model, samples.rows(own), sums)
        features[:, own] = [rows.cpu().numpy() for rows in sums.scaled()]
    return gramian, variances, features


def _not_zero(gramian: np.ndarray, ids: Sequence[object]) -> np.ndarray:
    """Return the positions of gradients that aren't zero, because no error is relative to 0."""
    positive = np.diagonal(gramian) > 0
    zero = [str(ids[i]) for i in np.flatnonzero(~positive).tolist()]
    if len(ids) - len(zero) < 2:
        raise InputError(
            "Measuring distortion needs at least two samples whose gradients aren't zero. Found "
            f"{len(ids) - len(zero)} among the {len(ids)} drawn. Leave `distortion` out.",
            code="stages.zero_gradients",
        )
    if zero:
        print(
            f"Notice: left out {len(zero)} of {len(ids)} samples, whose gradients are zero: "
            f"{listed(zero)}.",
            flush=True,
        )
    return np.flatnonzero(positive)


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
    gradients alone: ``most_samples``, if there are as many. Those with a zero gradient are left
    out, and two must stay. Each stream is a projection matrix: the checkpoint's own, and those of
    the stream numbers that follow it. Standard errors run over the ``n_streams`` of them.
    """
    torch.set_num_threads(threads)
    computes_on = full_precision(projecting_device(device))
    study = Study.load(study_file)
    loaded = LoadedModel.of_study(study, checkpoint, spec, computes_on)
    where = device_name(loaded.device)
    shapes = [parameter.shape for parameter in loaded.parameters.values()]
    projections = [projection_of(spec, shapes, i) for i in range(n_streams)]
    own = projections[0]
    train = study.split(TRAIN, None)
    n_drawn = min(most_samples, len(train.ids))
    need = distortion_need(n_drawn, own.proj_dim, n_streams)
    need.check(memory_mb)
    print(f"{n_drawn} training samples, {own.n_params} parameters, {n_streams} streams on {where}")
    (samples,) = loaded.ordered(_drawn(train, n_drawn))
    few, n_classes = loaded.few(samples)
    kept = loaded.stored(samples)
    for part, sample_id in zip(kept.parts, kept.ids, strict=True):
        check_labels(part.labels, loaded.output, n_classes, [sample_id])
    left_bytes = memory_mb * 2**20 - need.fixed_bytes - kept.n_bytes
    at_once = min(batch_size, _at_once(loaded, samples, few, left_bytes))
    loaded.check_apart(few, at_once)
    method = kept_way(loaded, few, artifact=distortion, spec=spec, code=code)
    gramian, variances, features = compare_gradients(
        loaded, kept, method, projections, at_once, threads
    )
    rows = _not_zero(gramian, kept.ids)
    pairs = np.ix_(rows, rows)
    errors = agreement(gramian[pairs], variances[pairs], list(features[:, rows]))
    file_spec = {
        **loaded.file_spec(spec, own.scaled()),
        "sample": {"drawn": n_drawn, "seed": _SEED},
        "streams": n_streams,
    }
    provenance = software(code, where, "torch", "numpy", *compilers(loaded.device))
    counts = {"n_streams": n_streams, "n_zero_gradients": n_drawn - len(rows)}
    with create(distortion, DISTORTION, file_spec, provenance, **counts) as writer:
        columns = ["measured", "standard_error", "predicted"]
        values = list(errors.values())
        writer.matrix("agreement", list(errors), columns, dtype=np.float64)[:] = values
        # From the order of computing to that of the study.
        order = rows[np.argsort(kept.places[rows])]
        writer.vector("sample_ids", [kept.ids[i] for i in order.tolist()])
    for key, (measured, error, predicted) in errors.items():
        print(f"{key}: error {measured:.3g} +- {error:.2g}, predicted {predicted:.3g}", flush=True)

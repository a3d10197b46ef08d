"""Project the per-sample gradients of one split under one checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from trak_core.artifacts import FEATURE_SHARD, FEATURES, create
from trak_core.blocks import with_progress
from trak_core.checkpoints import checkpoint_sha256, load_checkpoint
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    PerSample,
    as_batch,
    check_finite,
    check_labels,
    check_samples_apart,
    count_classes,
    gradient_method,
    in_chunks,
    n_params,
    sample_bytes,
    samples_that_fit,
    select_parameters,
)
from trak_core.projection import project
from trak_core.provenance import ids_digest, parameters_digest
from trak_core.spec import ProjectionSpec, stream_of
from trak_core.stages.output import CLIP, N_OTHERS, OTHERS_SEED, model_output
from trak_core.stages.software import software
from trak_core.study import TRAIN, Study

# Samples that are looked at before the expensive work.
_FEW = 8


def _device(name: str) -> tuple[torch.device, str]:
    if name == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                "compute.device is cuda, so torch must find a CUDA device. Found none: check "
                "`nvidia-smi` and that torch is a CUDA build, or set compute.device to cpu."
            )
        # Only here: a machine without CUDA does not need it. Better now than after the gradients.
        from trak_core.projection.cuda.machine import require_numba_cuda

        require_numba_cuda()
        return torch.device("cuda"), f"cuda {torch.cuda.get_device_name()}"
    return torch.device("cpu"), "cpu"


def _stored(rows: np.ndarray, dtype: str, sample_ids: Sequence[object]) -> np.ndarray:
    """Return the rows in the dtype they are stored in; float16 must hold them."""
    if dtype == "float32":
        return rows
    with np.errstate(over="ignore", under="ignore"):
        stored = rows.astype(np.float16)
    # Rounding alone costs 5e-4 at most; more is lost where entries fall below 6e-5 or overflow.
    exact = rows.astype(np.float64)
    with np.errstate(invalid="ignore"):
        lost = ~(np.linalg.norm(stored - exact, axis=1) <= 1e-3 * np.linalg.norm(exact, axis=1))
    if lost.any():
        found = [str(sample_ids[i]) for i in np.flatnonzero(lost)[:8]]
        size = np.abs(rows[lost])
        raise InputError(
            "Features stored as float16 must keep a sample's features to 1e-3 of their norm: "
            "entries of 6e-5 to 65504. Found entries from "
            f"{size[size > 0].min():.2g} to {size.max():.2g} in the samples {', '.join(found)}. "
            "Set features_dtype to float32."
        )
    return stored


def _project(result: PerSample, projection: ProjectionSpec, threads: int) -> np.ndarray:
    """Project a batch where its gradients are: the blocks as they come, never side by side."""
    blocks = [b.reshape(len(b), -1) for b in result.gradients.values()]
    if len({block.dtype for block in blocks}) > 1 or blocks[0].dtype is torch.float64:
        blocks = [block.float() for block in blocks]
    return project(blocks, projection, scale=True, threads=threads).cpu().numpy()


def compute_features(
    *,
    features: Path,
    checkpoint: Path,
    study: Path,
    split: str,
    shard: int,
    n_shards: int,
    spec: dict[str, Any],
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Fold gradients and projection over the samples of one split, or of one shard of it.

    The numbers don't depend on ``n_shards``, ``batch_size``, ``memory_mb`` or ``threads``, to
    float32 rounding.

    Args:
        features: The file to write.
        checkpoint: File or folder with the weights.
        study: The study's Python file.
        split: ``train``, or the name of an experiment.
        shard: Which shard, from 1.
        n_shards: How many there are; 1 for the whole split.
        spec: From the config: checkpoint (id), model_output, parameter_patterns, projection,
            dtype, targets (ids; None for train), study (digest).
        code: The stage's code digest.
        device: ``cpu`` or ``cuda``, for gradients and projection.
        batch_size: Samples differentiated at once, at most.
        memory_mb: MiB for gradients and activations on the CPU; fewer samples at once if they
            don't fit. On CUDA its free memory counts.
        threads: For torch and the projection.

    Raises:
        InputError: If study, checkpoint or gradients are not what they must be.
    """
    torch.set_num_threads(threads)
    torch_device, device_name = _device(device)
    loaded = Study.load(study)
    model = loaded.make_model()
    load_checkpoint(model, checkpoint)
    model.to(torch_device)
    parameters = select_parameters(model, spec["parameter_patterns"])
    pairs = loaded.split(TRAIN, None) if spec["model_output"] == CLIP else None
    output = model_output(spec["model_output"], model, pairs, torch_device)
    data = loaded.split(split, spec["targets"])
    start, stop = (len(data.ids) * i // n_shards for i in (shard - 1, shard))
    projection = ProjectionSpec(
        **spec["projection"], n_params=n_params(parameters), stream=stream_of(spec["checkpoint"])
    )
    file_spec = {
        "projection": {**projection.as_dict(), "scale": "1/sqrt(proj_dim)"},
        "parameters": parameters_digest({name: p.shape for name, p in parameters.items()}),
        "model_output": spec["model_output"],
        "checkpoint": {"id": spec["checkpoint"], "sha256": checkpoint_sha256(checkpoint)},
        "split": split,
        "dtype": spec["dtype"],
        "study": spec["study"],
        "parameter_patterns": spec["parameter_patterns"],
        "targets_digest": None if spec["targets"] is None else ids_digest(spec["targets"]),
    }
    if spec["model_output"] == CLIP:
        file_spec["other_pairs"] = {"drawn": N_OTHERS, "seed": OTHERS_SEED}
    if n_shards > 1:
        file_spec["shard"] = {"rows": [start, stop], "number": shard, "of": n_shards}
    kind = FEATURES if n_shards == 1 else FEATURE_SHARD
    compilers = ("numba", "numba-cuda") if torch_device.type == "cuda" else ("numba",)
    provenance = software(code, device_name, "torch", "numpy", *compilers)
    print(
        f"{split}: samples {start} to {stop} of {len(data.ids)}, {projection.n_params} parameters "
        f"to {projection.proj_dim} dimensions, gradients on {device_name}",
        flush=True,
    )
    ids = data.ids[start:stop]

    def batch_of(first: int, last: int) -> Batch:
        batch = as_batch(data.batch(start + first, start + last), output)
        return batch.mapped(lambda tensor: tensor.to(torch_device))

    # A look at a few samples before the expensive work.
    few = batch_of(0, min(_FEW, len(ids)))
    n_classes = count_classes(model, output, few, torch_device)
    check_labels(few.labels, output, n_classes, ids[:_FEW])
    needed_bytes = sample_bytes(model, parameters, output, few)
    chunk = min(batch_size, samples_that_fit(needed_bytes, torch_device, memory_mb))
    check_samples_apart(model, output, few.rows(slice(0, max(2, chunk))))
    method = gradient_method(model, parameters, output, few)
    print(f"{chunk} samples at once, about {needed_bytes / 2**20:.3g} MiB each", flush=True)

    def computed(first: int, last: int) -> tuple[np.ndarray, list[Tensor]]:
        """Return the features of some samples to be stored, and what goes with each sample."""
        batch = batch_of(first, last)
        check_labels(batch.labels, output, n_classes, ids[first:last])
        result = method(model, parameters, output, batch)
        check_finite(result, ids[first:last])
        projected = _project(result, projection, threads)
        numbers = vmap(output.label_number)(batch.labels)
        columns = [column.cpu() for column in (numbers, *result.columns())]
        return _stored(projected, spec["dtype"], ids[first:last]), columns

    results: list[list[Tensor]] = []
    with create(features, kind, file_spec, provenance) as writer:
        rows = writer.matrix(
            "features", ids, range(projection.proj_dim), dtype=np.dtype(spec["dtype"])
        )
        chunks = in_chunks(computed, len(ids), chunk)
        for first, last, (stored, columns) in with_progress(chunks, len(ids), "samples"):
            rows[first:last] = stored
            results.append(columns)
        labels, outputs, predictions, weights, *curvature = (
            torch.cat(parts) for parts in zip(*results, strict=True)
        )
        writer.vector("sample_ids", list(ids))
        writer.vector("labels", labels.numpy())
        writer.vector("outputs", outputs.float().numpy())
        writer.vector("predictions", predictions.numpy())
        if split == TRAIN:
            _warn_of_saturation(weights)
            writer.vector("loss_weights", weights.float().numpy())
            for numbers in curvature:
                writer.vector("curvature", numbers.float().numpy())


def _warn_of_saturation(loss_weights: Tensor) -> None:
    """Say when most training samples are fitted so well that their scores all but vanish."""
    saturated = (loss_weights.abs() < 1e-3).float().mean().item()
    if saturated > 0.5:
        print(
            f"Warning: {saturated:.0%} of the training samples have a loss weight below 1e-3: they "
            "are fitted almost exactly and get scores near 0. A loss_weight_power below 1, or an "
            "earlier checkpoint, ranks them better.",
            flush=True,
        )

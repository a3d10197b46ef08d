"""Project the per-sample gradients of one split under one checkpoint."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from trak_core.artifacts import FEATURE_SHARD, FEATURES, create
from trak_core.blocks import blocks_with_progress
from trak_core.checkpoints import checkpoint_sha256, load_checkpoint
from trak_core.errors import InputError
from trak_core.gradients import (
    PerSample,
    check_finite,
    check_labels,
    count_classes,
    n_params,
    per_sample_gradients,
    select_parameters,
)
from trak_core.model_outputs import MODEL_OUTPUTS
from trak_core.projection import project
from trak_core.provenance import ids_digest
from trak_core.spec import ProjectionSpec, stream_of
from trak_core.stages.software import software
from trak_core.study import TRAIN, Study


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
    blocks = [block.flatten(1) for block in result.gradients.values()]
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
    threads: int,
) -> None:
    """Fold gradients and projection over the samples of one split, or of one shard of it.

    The numbers don't depend on ``n_shards``, ``batch_size`` or ``threads``, to float32 rounding.

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
        batch_size: Samples differentiated at once.
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
    output = MODEL_OUTPUTS[spec["model_output"]]
    data = loaded.split(split, spec["targets"])
    start, stop = (len(data.ids) * i // n_shards for i in (shard - 1, shard))
    projection = ProjectionSpec(
        **spec["projection"], n_params=n_params(parameters), stream=stream_of(spec["checkpoint"])
    )
    names = [f"{name} {tuple(p.shape)}" for name, p in parameters.items()]
    file_spec = {
        "projection": {**projection.as_dict(), "scale": "1/sqrt(proj_dim)"},
        "parameters": hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest(),
        "model_output": spec["model_output"],
        "checkpoint": {"id": spec["checkpoint"], "sha256": checkpoint_sha256(checkpoint)},
        "split": split,
        "dtype": spec["dtype"],
        "study": spec["study"],
        "parameter_patterns": spec["parameter_patterns"],
        "targets_digest": None if spec["targets"] is None else ids_digest(spec["targets"]),
    }
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
    n_classes = count_classes(model, output, data.batch(start, start + 1), torch_device)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    with create(features, kind, file_spec, provenance) as writer:
        rows = writer.matrix(
            "features", ids, range(projection.proj_dim), dtype=np.dtype(spec["dtype"])
        )
        for first, last in blocks_with_progress(len(ids), batch_size, "samples"):
            batch = data.batch(start + first, start + last)
            check_labels(batch[-1], n_classes, ids[first:last])
            result = per_sample_gradients(
                model, parameters, output, [tensor.to(torch_device) for tensor in batch]
            )
            check_finite(result, ids[first:last])
            projected = _project(result, projection, threads)
            rows[first:last] = _stored(projected, spec["dtype"], ids[first:last])
            results.append((result.outputs.cpu(), result.predictions.cpu(), batch[-1]))
        outputs, predictions, labels = (torch.cat(parts) for parts in zip(*results, strict=True))
        writer.vector("sample_ids", list(ids))
        writer.vector("labels", labels.numpy())
        writer.vector("outputs", outputs.float().numpy())
        writer.vector("predictions", predictions.numpy())
        if split == TRAIN:
            weights = vmap(output.loss_weight)(outputs, labels)
            _warn_of_saturation(weights)
            writer.vector("loss_weights", weights.float().numpy())
            writer.vector("curvature", vmap(output.curvature)(outputs, labels).float().numpy())


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

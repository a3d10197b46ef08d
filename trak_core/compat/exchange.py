"""The door between a store and the pipeline: features go out as its artifacts, and come in.

A store keeps G = X R / sqrt(p), R unscaled, as users of TRAK know it; the pipeline keeps
Phi = X R s with the projection's own scale s (1 / sqrt(k)), so that Phi = G s sqrt(p). The matrix R
is the same one where kind, seed and stream are: the stream is the model id. A checkpoint ``run1``
of a config has the model id ``stream_of("run1")``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trak_core.artifacts import FEATURES, check_same, create, open_artifact
from trak_core.compat.batches import stored
from trak_core.compat.finalize import checked_ids
from trak_core.compat.projectors import known_projection
from trak_core.compat.samples import model_output_of
from trak_core.compat.savers import SAMPLE_COLUMNS
from trak_core.compat.traker import TRAKer
from trak_core.config.digests import study_digests, targets_digest
from trak_core.errors import InputError
from trak_core.provenance import code_digest, parameters_digest
from trak_core.spec import ProjectionKind, ProjectionSpec, stream_of
from trak_core.study.checkpoints import checkpoint_sha256
from trak_core.study.study import TRAIN
from trak_core.system.progress import software

_BLOCK = 4096


def _projection(traker: TRAKer, model_id: int) -> ProjectionSpec:
    projection = known_projection(traker.projector, traker.num_params_for_grad, model_id)
    if projection is None or model_output_of(traker.task) is None:
        raise InputError(
            "The pipeline can take features of its own model outputs and projections only. Found "
            f"the task {type(traker.task).__name__} and {type(traker.projector).__name__}."
        )
    return projection


def _shared_spec(traker: TRAKer, projection: ProjectionSpec) -> dict[str, Any]:
    """Return what an artifact says of itself that a TRAKer knows as well, under the same keys."""
    scale = "1" if projection.kind is ProjectionKind.IDENTITY else "1/sqrt(proj_dim)"
    return {
        "projection": {**projection.as_dict(), "scale": scale},
        "parameters_digest": parameters_digest(traker.parameters),
        "model_output": model_output_of(traker.task),
        # What a TRAKer never does to gradients or labels.
        "preconditioner": None,
        "flipped": None,
    }


def _scale(traker: TRAKer, projection: ProjectionSpec) -> float:
    """Return Phi / G."""
    return projection.scale * float(traker.normalize_factor)


def export_features(
    traker: TRAKer,
    model_id: int,
    file: Path | str,
    *,
    exp_name: str | None = None,
    checkpoint: str | None = None,
    checkpoint_file: Path | str | None = None,
    study_file: Path | str | None = None,
    sample_ids: Sequence[int] | Sequence[str] | None = None,
) -> None:
    """Write one model id's features as the pipeline's artifact.

    With ``checkpoint``, ``checkpoint_file`` and ``study_file`` the file is what the pipeline would
    have computed for that study itself, and its jobs take it: put it where they look,
    ``results/features/{checkpoint}/train.h5``; but not if the config names ``data_files``, whose
    content counts there. Without them it can be combined with files of the same store alone.

    Args:
        traker: Whose store; it must hold all rows.
        model_id: Whose features.
        file: Where to.
        exp_name: The targets of an experiment; None for the training samples.
        checkpoint: The checkpoint's id in a config; ``stream_of`` it must be the model id.
        checkpoint_file: Its weights, as the config names them.
        study_file: The study's Python file.
        sample_ids: The samples' ids, in order; 0, 1, 2, ... if None.

    Raises:
        ModelIDException: If the model id is not in the store.
        InputError: If the pipeline has no such model output or projection, if rows are missing, or
            if the ids don't fit.
    """
    projection = _projection(traker, model_id)
    if checkpoint is not None and stream_of(checkpoint) != model_id:
        raise InputError(
            f"The model id of checkpoint {checkpoint!r} must be its projection's stream, "
            f"{stream_of(checkpoint)} (`trak_core.spec.stream_of`). Found {model_id}: featurize it "
            "under that model id."
        )
    found = _rows(traker, model_id, exp_name)
    if found is None:
        raise InputError(
            f"To leave the store, all rows of model id {model_id} must be there, with labels and "
            "predictions. Found some missing: featurize or score all of them, before `del_grads`."
        )
    gradients, samples, weights = found
    ids = list(range(len(gradients))) if sample_ids is None else list(sample_ids)
    if len(ids) != len(gradients):
        raise InputError(
            f"`sample_ids` must hold one id a sample, {len(gradients)}. Found {len(ids)}."
        )
    state = traker.saver.model_ids[model_id]
    own = {"id": str(model_id), "sha256": state.get("checkpoint")}
    identity = dict(state.get("imported", own))
    if checkpoint is not None:
        identity["id"] = checkpoint
    if checkpoint_file is not None:
        identity["sha256"] = checkpoint_sha256(Path(checkpoint_file))
    digests = {} if study_file is None else study_digests(Path(study_file))
    spec = {
        **_shared_spec(traker, projection),
        "checkpoint": identity,
        "split": TRAIN if exp_name is None else exp_name,
        "dtype": "float32",
        "study_digest": digests.get("features"),
        "parameter_patterns": traker.grad_wrt,
        "targets_digest": (None if exp_name is None else targets_digest(ids, None, digests)),
    }
    made_by = software(code_digest(__name__), str(traker.device), "torch", "numpy", "numba")
    # What the store had rounded stays rounded, and is said here.
    made_by["store"] = str(gradients.dtype)
    with create(Path(file), FEATURES, spec, made_by) as writer:
        rows = writer.matrix("features", ids, range(traker.proj_dim))
        scale = _scale(traker, projection)
        for first in range(0, len(ids), _BLOCK):
            block = gradients[first : first + _BLOCK].astype(np.float64)
            rows[first : first + _BLOCK] = block * scale
        writer.vector("sample_ids", ids)
        for column, key in enumerate(SAMPLE_COLUMNS):
            values = np.asarray(samples[:, column])
            is_class = key in {"labels", "predictions"}
            writer.vector(key, values.astype(np.int64 if is_class else np.float32))
        if weights is not None:
            writer.vector("loss_weights", np.asarray(weights[:, 0], dtype=np.float32))


def _rows(
    traker: TRAKer, model_id: int, exp_name: str | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Return gradients, samples and, in training, loss weights; None if rows are missing."""
    saver = traker.saver
    checked_ids(saver, [model_id])
    saver.load_current_store(model_id, mode="r")
    store, prefix = saver.current_store, ""
    if exp_name is None:
        complete = bool(saver.model_ids[model_id]["is_featurized"])
    else:
        complete, prefix = exp_name in saver.experiments, f"{exp_name}_"
        if complete:
            num_targets = saver.experiments[exp_name]["num_targets"]
            saver.load_current_store(model_id, exp_name, num_targets, mode="r")
    gradients, samples = store.get(f"{prefix}grads"), store.get(f"{prefix}samples")
    if not complete or gradients is None or samples is None or np.isnan(samples).any():
        return None
    return gradients, samples, store["out_to_loss"] if exp_name is None else None


def import_features(
    traker: TRAKer, file: Path | str, model_id: int, *, exp_name: str | None = None
) -> None:
    """Take a features artifact of the pipeline into the store, as if it had been computed here.

    Args:
        traker: Into whose store; same model, parameters, projection and number of samples.
        file: The artifact, ``results/features/{checkpoint}/{split}.h5``.
        model_id: Must be the stream of the file's projection.
        exp_name: Take it as the targets of this experiment; None: as training samples.

    Raises:
        InputError: If the file is damaged, or was made for something else; if the pipeline has no
            such model output or projection.
    """
    saver, path = traker.saver, Path(file)
    projection = _projection(traker, model_id)
    expected = {**_shared_spec(traker, projection), "shard": None}
    with open_artifact(path, FEATURES) as artifact:
        found = {key: artifact.spec.get(key) for key in expected}
        check_same("settings of this TRAKer and model id", expected, found, path, FEATURES.rule)
        features, n_rows = artifact.matrix("features"), len(artifact.vector("sample_ids"))
        if exp_name is None:
            check_same("number of samples", traker.train_set_size, n_rows, path, FEATURES.rule)
            if not artifact.has("loss_weights"):
                raise InputError(f"{path}: training samples must have loss weights. Found none.")
            if not saver.is_registered(model_id):
                saver.register_model_id(model_id)
            saver.load_current_store(model_id)
            saver.model_ids[model_id]["imported"] = artifact.spec["checkpoint"]
        else:
            saver.init_experiment(exp_name, n_rows, model_id)
        store = saver.current_store
        prefix = "" if exp_name is None else f"{exp_name}_"
        scale = _scale(traker, projection)
        for first in range(0, n_rows, _BLOCK):
            rows = np.arange(first, min(first + _BLOCK, n_rows))
            block = features[first : first + _BLOCK].astype(np.float64) / scale
            store[f"{prefix}grads"][rows] = stored(
                torch.from_numpy(block), traker.dtype, rows, "imported gradients"
            )
        for column, key in enumerate(SAMPLE_COLUMNS):
            if artifact.has(key):
                store[f"{prefix}samples"][:, column] = artifact.vector(key)
        if exp_name is None:
            weights = torch.from_numpy(artifact.vector("loss_weights")[:, None])
            store["out_to_loss"][:] = stored(
                weights, traker.dtype, np.arange(n_rows), "loss weights", may_vanish=True
            )
            store["is_featurized"][:] = 1
            saver.serialize_current_model_id_metadata()

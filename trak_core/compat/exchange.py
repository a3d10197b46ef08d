"""The door between a store and the pipeline: features go out as its artifacts, and come in.

A store keeps G = X R / sqrt(p), R unscaled, as users of TRAK know it; the pipeline keeps
Phi = X R s with the projection's own scale s (1 / sqrt(k)), so that Phi = G s sqrt(p). The matrix R
is the same one where kind, seed and stream are: the stream is the model id. A checkpoint ``run1``
of a config has the model id ``stream_of("run1")``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.artifacts import FEATURES, check_same, create, open_artifact
from trak_core.compat.batches import stored
from trak_core.compat.modelout_functions import (
    AbstractModelOutput,
    ClassificationModelOutput,
)
from trak_core.compat.projectors import known_projection
from trak_core.compat.savers import SAMPLE_COLUMNS
from trak_core.errors import InputError
from trak_core.gradients import check_labels, check_samples_apart
from trak_core.model_outputs.table import TABLE
from trak_core.provenance import code_digest, ids_digest, parameters_digest, study_digest
from trak_core.spec import ProjectionKind, ProjectionSpec, stream_of
from trak_core.study.checkpoints import checkpoint_sha256
from trak_core.study.study import TRAIN
from trak_core.system.software import software

if TYPE_CHECKING:
    from trak_core.compat.featurizer import Featurizer

_BLOCK = 4096


@functools.cache
def _code() -> str:
    return code_digest(__name__)


def model_output_of(task: AbstractModelOutput) -> str | None:
    """Return the pipeline's name of a task's model output, None if it has none.

    A subclass may compute anything, and a temperature is nothing that the pipeline knows.
    """
    name = vars(type(task)).get("model_output")
    return name if getattr(task, "loss_temperature", 1) == 1 else None


def check_task(task: AbstractModelOutput, model: nn.Module, batch: Sequence[Tensor]) -> None:
    """Refuse a model that mixes the samples of a batch, where the task is a known one.

    Raises:
        InputError: It names the layer.
    """
    name = model_output_of(task)
    if name is not None:
        assert isinstance(task, ClassificationModelOutput)
        check_samples_apart(model, TABLE[name].load(), task.as_samples(batch))


def describe(task: AbstractModelOutput, model: nn.Module, batch: Sequence[Tensor]) -> np.ndarray:
    """Return what the pipeline keeps of samples beside features, NaN where it has no name for them.

    Args:
        task: The model output.
        model: With the checkpoint's weights.
        batch: Inputs and, last, labels.

    Returns:
        ``SAMPLE_COLUMNS``, shape (B, 4), float64.

    Raises:
        InputError: If a label is not one of the model's.
    """
    name = model_output_of(task)
    if name is None:
        return np.full((len(batch[0]), len(SAMPLE_COLUMNS)), np.nan)
    output, labels = TABLE[name].load(), batch[-1]
    assert isinstance(task, ClassificationModelOutput)
    assert output.curvature is not None
    with torch.no_grad():
        logits = task.get_logits(model, None, None, batch[:-1])
        check_labels(labels, output, logits.shape[-1], range(len(labels)))
        functions = (output.value, output.prediction, output.curvature)
        f, predictions, curvature = (torch.vmap(g)(logits, labels) for g in functions)
        columns = [column.double() for column in (f, labels, predictions, curvature)]
    return torch.stack(columns, dim=1).cpu().numpy()


def _described(projection: ProjectionSpec) -> dict[str, Any]:
    """Return a projection as artifacts describe it."""
    scale = "1" if projection.kind is ProjectionKind.IDENTITY else "1/sqrt(proj_dim)"
    return {**projection.as_dict(), "scale": scale}


def _scale(traker: Featurizer, projection: ProjectionSpec) -> float:
    """Return Phi / G."""
    return projection.scale * float(traker.normalize_factor)


def export_features(
    traker: Featurizer,
    model_id: int,
    file: Path | str,
    *,
    exp_name: str | None = None,
    checkpoint: str | None = None,
    checkpoint_file: Path | str | None = None,
    study: Path | str | None = None,
    sample_ids: Sequence[int] | Sequence[str] | None = None,
) -> None:
    """Write one model id's features as the pipeline's artifact.

    With ``checkpoint``, ``checkpoint_file`` and ``study`` the file is what the pipeline would have
    computed for that study itself, and its jobs take it: put it where they look,
    ``results/features/{checkpoint}/train.h5``. Without them it can be combined with files of the
    same store alone.

    Args:
        traker: Whose store; it must hold all rows.
        model_id: Whose features.
        file: Where to.
        exp_name: The targets of an experiment; None for the training samples.
        checkpoint: The checkpoint's id in a config; ``stream_of`` it must be the model id.
        checkpoint_file: Its weights, as the config names them.
        study: The study's Python file.
        sample_ids: The samples' ids, in order; 0, 1, 2, ... if None.

    Raises:
        InputError: If the pipeline has no such model output or projection, if rows are missing, or
            if the ids don't fit.
    """
    name = model_output_of(traker.task)
    projection = known_projection(traker.projector, traker.num_params_for_grad, model_id)
    if name is None or projection is None:
        raise InputError(
            "The pipeline can take features of its own model outputs and projections only. Found "
            f"the task {type(traker.task).__name__} and {type(traker.projector).__name__}."
        )
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
    spec = {
        "projection": _described(projection),
        "parameters": parameters_digest(traker.parameters),
        "model_output": name,
        "checkpoint": identity,
        "split": TRAIN if exp_name is None else exp_name,
        "dtype": "float32",
        "study": None if study is None else study_digest(Path(study)),
        "parameter_patterns": traker.grad_wrt,
        "targets_digest": None if exp_name is None else ids_digest(ids),
    }
    made_by = software(_code(), str(traker.device), "torch", "numpy", "numba")
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
    traker: Featurizer, model_id: int, exp_name: str | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Return gradients, samples and, in training, loss weights; None if rows are missing."""
    saver = traker.saver
    saver.load_current_store(model_id, mode="r")
    if exp_name is not None:
        num_targets = saver.experiments[exp_name]["num_targets"]
        saver.load_current_store(model_id, exp_name, num_targets, mode="r")
    prefix = "" if exp_name is None else f"{exp_name}_"
    gradients = saver.current_store.get(f"{prefix}grads")
    samples = saver.current_store.get(f"{prefix}samples")
    complete = exp_name is not None or saver.model_ids[model_id]["is_featurized"]
    if gradients is None or samples is None or not complete or np.isnan(samples).any():
        return None
    return gradients, samples, saver.current_store["out_to_loss"] if exp_name is None else None


def import_features(
    traker: Featurizer, file: Path | str, model_id: int, *, exp_name: str | None = None
) -> None:
    """Take a features artifact of the pipeline into the store, as if it had been computed here.

    Args:
        traker: Into whose store; same model, parameters, projection and number of samples.
        file: The artifact, ``results/features/{checkpoint}/{split}.h5``.
        model_id: Must be the stream of the file's projection.
        exp_name: Take it as the targets of this experiment; None: as training samples.

    Raises:
        InputError: If the file is damaged, or was made for something else.
    """
    saver, path = traker.saver, Path(file)
    with open_artifact(path, FEATURES) as artifact:
        projection = known_projection(traker.projector, traker.num_params_for_grad, model_id)
        expected: dict[str, Any] = {
            "projection": projection and _described(projection),
            "parameters": parameters_digest(traker.parameters),
            "model_output": model_output_of(traker.task),
            "shard": None,
        }
        found = {key: artifact.spec.get(key) for key in expected}
        check_same("settings of this TRAKer and model id", expected, found, path, FEATURES.rule)
        assert projection is not None
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


def write_artifact(traker: Featurizer, model_id: int, exp_name: str | None = None) -> None:
    """Write what the pipeline can take into ``save_dir``, ``artifacts/features/{m}/{split}.h5``.

    Nothing is written for a task or a projector that the pipeline does not know, and for a training
    set whose gradients were deleted.
    """
    split = TRAIN if exp_name is None else exp_name
    file = traker.save_dir / "artifacts" / "features" / str(model_id) / f"{split}.h5"
    # Training features change no more once they are complete; targets may be scored again.
    if exp_name is None and file.exists():
        return
    name = model_output_of(traker.task)
    projection = known_projection(traker.projector, traker.num_params_for_grad, model_id)
    rows = _rows(traker, model_id, exp_name)
    if name is None or projection is None or rows is None or exp_name == TRAIN:
        traker.logger.info(f"Model id {model_id}: nothing is written for the pipeline of {split}.")
        return
    export_features(traker, model_id, file, exp_name=exp_name)

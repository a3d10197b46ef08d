"""Compute inner products of gradients, or scores by the Gauss-Newton matrix: no projection."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trak_core.artifacts import checkpoint_scores_kind, create, selected_ids, software
from trak_core.attribution.device import device_name, find_device, full_precision
from trak_core.attribution.gauss_newton_scores import STEPS, newton_scores
from trak_core.attribution.inner_products import write_gramian
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import warn_of_saturation
from trak_core.spec import TRAIN, FeaturesSpec, ScoresSpec
from trak_core.stages._shared import PER_SAMPLE
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study


def compute_gramian(
    *,
    gramian: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    targets: Sequence[int | str] | None = None,
    question: Path | None = None,
    selected: Sequence[Path] = (),
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Compute K = J J^T of the training samples, or K_t = J J_t^T between them and targets.

    J are the gradients of the model output, which are never formed as a whole. Rows are training
    samples, columns the split's. Two blocks of ``batch_size`` samples are in the model at once, at
    most; ``memory_mb`` must hold the Gramian. A file of ``selected`` targets has their ids, in
    place of ``targets``.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    on = full_precision(find_device(device))
    loaded = LoadedModel.of_study(study, checkpoint, spec, on)
    split = spec.split or TRAIN
    data = study.split(TRAIN, None)
    ids = selected_ids(selected, spec) or targets
    targets_split = None if split == TRAIN else split_of(study, split, ids, question)
    sizes = {"batch_size": batch_size, "memory_mb": memory_mb}
    write_gramian(gramian, loaded, data, targets_split, spec, code=code, **sizes)


def compute_newton_scores(
    *,
    scores: Path,
    checkpoint: Path,
    study_file: Path,
    spec: ScoresSpec,
    targets: Sequence[int | str] | None = None,
    question: Path | None = None,
    selected: Sequence[Path] = (),
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Solve the Gauss-Newton matrix of the training loss for the targets, by conjugate gradients.

    Writes A_c of ``newton_scores``, in the same kind of file as scores by a projection. A file of
    ``selected`` targets has their ids, in place of ``targets``.
    """
    torch.set_num_threads(threads)
    features = spec.features
    study = Study.load(study_file)
    on = full_precision(find_device(device))
    loaded = LoadedModel.of_study(study, checkpoint, features, on)
    where, data = device_name(on), study.split(TRAIN, None)
    ids = selected_ids(selected, spec.of_targets()) or targets
    own = split_of(study, str(spec.experiment), ids, question)
    print(f"{spec.experiment}: scores of {len(data.ids)} x {len(own.ids)} samples on {where}")
    result = newton_scores(loaded, data, own, spec.damping, batch_size, memory_mb)
    about = loaded.file_spec(features, features.projection)
    file_spec = {
        **spec.as_dict(),
        **{key: about[key] for key in ("checkpoint", "projection", "parameters_digest")},
        "lambda": result.ridge,
        "gauss_newton": {"steps": STEPS, "samples": result.curved},
    }
    kind = checkpoint_scores_kind(features.projection)
    with create(scores, kind, file_spec, software(code, where, "torch", "numpy")) as writer:
        values = writer.matrix("similarities", data.ids, own.ids, chunks=(1024, 64))
        values[:] = result.values.astype(np.float32)
        for side, ids, columns in (
            ("train", data.ids, result.train),
            ("target", own.ids, result.targets),
        ):
            writer.vector(f"{side}_ids", list(ids))
            for key, column in zip(PER_SAMPLE, columns, strict=False):
                writer.vector(f"{side}_{key}", _stored(column))
        warn_of_saturation(result.train[3], features.model_output)
        writer.vector("loss_weights", _stored(result.train[3]))


def _stored(column: torch.Tensor) -> np.ndarray:
    column = column.cpu()
    return (column.float() if column.is_floating_point() else column).numpy()

"""Compute inner products of gradients, or Gauss-Newton scores, without a projection."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trak_core.artifacts import checkpoint_scores_kind, create, selected_ids, software
from trak_core.attribution.device import at_precision, device_name, find_device
from trak_core.attribution.gauss_newton_scores import STEPS, newton_scores
from trak_core.attribution.inner_products import write_gramian
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import warn_of_saturation
from trak_core.settings import TRAIN, FeaturesSpec, ScoresSpec
from trak_core.stages._shared import PER_SAMPLE
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study


@at_precision
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
    """Write K = J J^T of the training samples, or K_t = J J_t^T between them and targets.

    The rows of J are gradients of the model output. J is never stored as a whole: K is computed in
    blocks, from at most two batches of ``batch_size`` samples at once. K must fit in ``memory_mb``.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    loaded = LoadedModel.of_study(study, checkpoint, spec, find_device(device))
    split, ids = spec.split or TRAIN, selected_ids(selected, spec) or targets
    write_gramian(
        gramian,
        loaded,
        study.split(TRAIN, None),
        None if split == TRAIN else split_of(study, split, ids, question),
        spec,
        code=code,
        batch_size=batch_size,
        memory_mb=memory_mb,
    )


@at_precision
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
    """Write A_c of ``newton_scores``, in the same kind of file as scores from a projection."""
    torch.set_num_threads(threads)
    features = spec.features
    study = Study.load(study_file)
    chosen_device = find_device(device)
    loaded = LoadedModel.of_study(study, checkpoint, features, chosen_device)
    where, train = device_name(chosen_device), study.split(TRAIN, None)
    ids = selected_ids(selected, spec.of_targets()) or targets
    split = split_of(study, str(spec.experiment), ids, question)
    print(f"{spec.experiment}: scores of {len(train.ids)} x {len(split.ids)} samples on {where}")
    result = newton_scores(loaded, train, split, spec.damping, batch_size, memory_mb)
    features_spec = loaded.file_spec(features, features.projection)
    file_spec = {
        **spec.as_dict(),
        **{key: features_spec[key] for key in ("checkpoint", "projection", "parameters_digest")},
        "lambda": result.ridge,
        "gauss_newton": {"steps": STEPS, "samples": result.curved},
    }
    kind = checkpoint_scores_kind(features.projection)
    with create(scores, kind, file_spec, software(code, where, "torch", "numpy")) as writer:
        values = writer.matrix("similarities", train.ids, split.ids, chunks=(1024, 64))
        values[:] = result.values.astype(np.float32)
        for prefix, ids, columns in (
            ("train", train.ids, result.train),
            ("target", split.ids, result.targets),
        ):
            writer.vector(f"{prefix}_ids", list(ids))
            for key, column in zip(PER_SAMPLE, columns, strict=False):
                writer.vector(f"{prefix}_{key}", _as_stored(column))
        warn_of_saturation(result.train[3], features.model_output)
        writer.vector("loss_weights", _as_stored(result.train[3]))


def _as_stored(column: torch.Tensor) -> np.ndarray:
    column = column.cpu()
    return (column.float() if column.is_floating_point() else column).numpy()

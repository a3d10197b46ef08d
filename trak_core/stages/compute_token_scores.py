"""Split an experiment's largest scores into contributions of tokens and into those of layers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from trak_core.artifacts import (
    FEATURES,
    NORMAL_MATRIX,
    SCORES,
    TOKEN_SCORES,
    Artifact,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.device import Compute, device_name, find_device
from trak_core.attribution.fitted_checkpoint import read_normal_matrix
from trak_core.attribution.gradient_method_record import recorded_method_for
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import compilers
from trak_core.attribution.score_formulas import checkpoint_weights
from trak_core.attribution.token_scores import split_pairs, token_tables
from trak_core.settings import TRAIN, ScoresSpec
from trak_core.stages._shared import open_made_for, positions
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study

# The largest number of targets, and for each target the number of scores of each sign to split.
_TARGETS, _EACH = 100, 10


def compute_token_scores(
    *,
    token_scores: Path,
    scores: Path,
    checkpoints: Sequence[Path],
    train_paths: Sequence[Path],
    targets_paths: Sequence[Path],
    normal_matrices: Sequence[Path],
    spec: ScoresSpec,
    study_file: Path,
    question: Path | None = None,
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Split the largest scores into contributions of the tokens in both texts, and of the layers.

    A checkpoint's score of a training sample for a target is an inner product of two vectors. The
    first is the training sample's gradient. The second is computed from the target's features: they
    are multiplied by the inverse normal matrix, and then by the transposed projection matrix, which
    gives a vector as long as the gradient.

    The gradient is a sum over the positions in the training text. The contribution of a token is
    the inner product of the term for its position with the second vector. The contribution of a
    layer is the part of the inner product that belongs to the layer's parameters. The contributions
    of the target's tokens are computed in the same way, with the two samples exchanged.

    The ten largest scores of each sign are split, for each of the first 100 targets that have a
    score other than 0. ``checkpoints``, ``train_paths``, ``targets_paths`` and ``normal_matrices``
    are in the order of ``spec.checkpoints``.
    """
    torch.set_num_threads(threads)
    with open_made_for(scores, SCORES, spec) as file:
        top, target_ids = file.table("top_influences"), file.table("targets")["id"].tolist()
        scores_hash, made_from = file.content_hash, [file.provenance]
    # If all scores for a target are 0, the table contains no row for it.
    with_scores = set(top["target_id"].tolist())
    target_ids = [sample_id for sample_id in target_ids if sample_id in with_scores][:_TARGETS]
    is_split = top["target_id"].isin(target_ids) & (top["rank"] <= _EACH)
    top = top.loc[is_split, :].reset_index(drop=True)
    train_ids = list(dict.fromkeys(top["train_id"].tolist()))
    rows = positions(train_ids, top["train_id"].tolist())
    columns = positions(target_ids, top["target_id"].tolist())
    split_scores, loss_weights, norms = [], [], []
    where, study = find_device(device, projects=True), Study.load(study_file)
    for number, checkpoint in enumerate(spec.checkpoints):
        own = spec.under(checkpoint)
        with (
            open_made_for(train_paths[number], FEATURES, own.of_train()) as train,
            open_made_for(targets_paths[number], FEATURES, own.of_targets()) as target,
            open_artifact(normal_matrices[number], NORMAL_MATRIX) as matrix,
        ):
            damped, norm = read_normal_matrix(matrix, train, own)
            stored_rows = positions(train.ids("sample_ids"), train_ids)
            phi = _read_rows(train, stored_rows)
            target_phi = _read_rows(target, positions(target.ids("sample_ids"), target_ids))
            loss_weights.append(train.vector("loss_weights")[stored_rows])
        norms.append(norm or 1.0)
        print(f"Checkpoint {checkpoint}: {len(top)} scores", flush=True)
        features_spec = own.of_train()
        method_of = partial(
            recorded_method_for, artifact=token_scores, spec=features_spec, code=code
        )
        loaded = LoadedModel.of_study(study, checkpoints[number], features_spec, where)
        loaded = replace(loaded, method_of=method_of)
        current = loaded.file_spec(features_spec, {})["checkpoint"]
        check_same("checkpoints", current, train.spec["checkpoint"], train)
        targets = split_of(study, str(spec.experiment), target_ids, question)
        splits = study.split(TRAIN, None).take(train_ids), targets
        pairs = np.column_stack([rows, columns])
        compute = Compute(where, batch_size, memory_mb, threads)
        given = loaded, own, damped, splits, (phi, target_phi), pairs, compute
        split_scores.append(split_pairs(*given))
    weights = checkpoint_weights(np.stack(loss_weights), np.array(norms), spec)
    tokens, layers = token_tables(top, split_scores, weights[:, rows])
    _print_accuracy(top, tokens, layers)
    packages = "torch", "numpy", *compilers(where)
    provenance = software(code, device_name(where), *packages, made_from=made_from)
    file_spec = spec.as_dict() | {"scores": scores_hash}
    with create(token_scores, TOKEN_SCORES, file_spec, provenance) as writer:
        writer.table("tokens", tokens, ["target_id", "train_id"])
        writer.table("layers", layers, ["target_id", "train_id"])


def _read_rows(features: Artifact, rows: Sequence[int]) -> np.ndarray:
    values = features.matrix("features")
    return np.stack([values[row] for row in rows]).astype(np.float64)


def _print_accuracy(top: pd.DataFrame, tokens: pd.DataFrame, layers: pd.DataFrame) -> None:
    pair = ["target_id", "train_id"]
    scores = top.set_index(pair)["score"]
    sums = tokens.pivot_table("score", pair, "side", "sum")
    sums["layers"] = layers.pivot_table("score", pair, aggfunc="sum")["score"]
    error = sums.sub(scores, axis="index").abs().to_numpy().max() / scores.abs().max()
    print(f"Sums of contributions differ from scores by at most {error:.1g} of the largest score")

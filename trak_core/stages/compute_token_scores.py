"""Cut an experiment's largest scores by tokens, of both texts, and by the model's layers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from trak_core.artifacts import (
    FEATURES,
    NORMAL_MATRIX,
    SCORES,
    TOKEN_SCORES,
    check_made_for,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.device import device_name
from trak_core.attribution.fitted_checkpoint import DampedNormalMatrix
from trak_core.attribution.gradient_method_record import recorded_method_for
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import compilers, projecting_device
from trak_core.attribution.scores import checkpoint_weights, powered
from trak_core.attribution.token_scores import SIDES, cut_pairs, token_tables
from trak_core.attribution.token_shares import Shares
from trak_core.spec import TRAIN, Combine, ScoresSpec
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study

# Targets, from the first, and training samples of either sign for each.
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
    """Differentiate the samples of the largest scores once more, and cut their scores.

    Under each checkpoint a score is <x_i, g_j>: x_i is the gradient of the training sample, g_j the
    target, solved for and projected back. A token's score is what its place adds to x_i where the
    model uses its parameters; a layer's, what its parameters add. The target's tokens are cut
    likewise, with the training sample projected back. There are scores of the ten training samples
    of either sign for each of the first 100 targets with a score other than 0. ``checkpoints``,
    features and normal matrices stand in the order of the spec's checkpoints.
    """
    torch.set_num_threads(threads)
    with open_artifact(scores, SCORES) as file:
        check_made_for(file, spec)
        top, target_ids = file.table("top_influences"), file.table("targets")["id"].tolist()
        scores_hash, made_from = file.content_hash, [file.provenance]
    # A target whose scores are all 0 has no row, and nothing to be cut.
    with_scores = set(top["target_id"].tolist())
    target_ids = [sample_id for sample_id in target_ids if sample_id in with_scores][:_TARGETS]
    is_cut = top["target_id"].isin(target_ids) & (top["rank"] <= _EACH)
    top = top.loc[is_cut, :].reset_index(drop=True)
    train_ids = list(dict.fromkeys(top["train_id"].tolist()))
    place = {sample_id: i for i, sample_id in enumerate(train_ids)}
    target_place = {sample_id: i for i, sample_id in enumerate(target_ids)}
    rows = [place[i] for i in top["train_id"].tolist()]
    columns = [target_place[i] for i in top["target_id"].tolist()]
    cuts, powers, norms = [], [], []
    where, study = projecting_device(device), Study.load(study_file)
    for number, checkpoint in enumerate(spec.checkpoints):
        own = spec.under(checkpoint)
        with (
            open_artifact(train_paths[number], FEATURES) as train,
            open_artifact(targets_paths[number], FEATURES) as target,
            open_artifact(normal_matrices[number], NORMAL_MATRIX) as matrix,
        ):
            check_made_for(train, own.of_train())
            check_made_for(target, own.of_targets())
            damped = DampedNormalMatrix.read(matrix, train, own)
            phi = _rows(train, train_ids)
            target_phi = _rows(target, target_ids)
            rows_of = {sample_id: i for i, sample_id in enumerate(train.ids("sample_ids"))}
            weights = train.vector("loss_weights")[[rows_of[i] for i in train_ids]]
        powers.append(powered(weights, spec.loss_weight_power or 1.0))
        norms.append(damped.norm or 1.0)
        print(f"Checkpoint {checkpoint}: {len(top)} scores", flush=True)
        loaded = LoadedModel.of_study(study, checkpoints[number], own.of_train(), where)
        today = loaded.file_spec(own.of_train(), {})["checkpoint"]
        check_same("checkpoints", today, train.spec["checkpoint"], train)
        splits = (
            study.split(TRAIN, None).take(train_ids),
            split_of(study, str(spec.experiment), target_ids, question),
        )
        pairs = list(zip(rows, columns, strict=True))
        known = {"artifact": token_scores, "spec": own.of_train(), "code": code}
        method_of = partial(recorded_method_for, reads_terms=Shares.reads_terms, **known)
        features = phi, target_phi
        given = loaded, own, damped, splits, features, pairs, batch_size, memory_mb
        cuts.append(cut_pairs(*given, method_of))
    assert spec.combine is not None
    counts = checkpoint_weights(np.stack(powers), np.array(norms), Combine(spec.combine))[:, rows]
    tokens, layers = token_tables(top, cuts, counts)
    of_sides = (tokens.loc[tokens["side"] == side, :] for side in SIDES)
    _say_sums(top, *of_sides, layers)
    provenance = software(
        code, device_name(where), "torch", "numpy", *compilers(where), made_from=made_from
    )
    with create(
        token_scores, TOKEN_SCORES, spec.as_dict() | {"scores": scores_hash}, provenance
    ) as writer:
        writer.table("tokens", tokens, ["target_id", "train_id"])
        writer.table("layers", layers, ["target_id", "train_id"])


def _rows(features: Any, ids: Sequence[Any]) -> np.ndarray:
    """Return the features of some samples, float64, in the order of their ids."""
    place = {sample_id: i for i, sample_id in enumerate(features.ids("sample_ids"))}
    values = features.matrix("features")
    return np.stack([values[place[i] : place[i] + 1][0] for i in ids]).astype(np.float64)


def _say_sums(top: pd.DataFrame, *tables: pd.DataFrame) -> None:
    """Print how far rows are from adding up to the scores."""
    names = ["target_id", "train_id", "score"]
    scores = {(target, train): score for target, train, score in top[names].to_numpy().tolist()}
    off = 0.0
    for table in tables:
        sums = dict.fromkeys(scores, 0.0)
        for target, train, score in table[names].to_numpy().tolist():
            sums[target, train] += score
        off = max(off, *(abs(sums[pair] - score) for pair, score in scores.items()))
    largest = max(map(abs, scores.values()))
    print(f"Rows add up to the scores within {off / largest:.1g} of the largest")

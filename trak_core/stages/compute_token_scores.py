"""Cut an experiment's largest scores by tokens, of both texts, and by the model's layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
)
from trak_core.gradients import Batch, gradient_method, in_chunks
from trak_core.model.device import device_name
from trak_core.model.features import compilers, projecting_device
from trak_core.model.loaded_model import LoadedModel
from trak_core.model.token_shares import Pairs, Shares
from trak_core.scoring.scores import checkpoint_weights, powered, unit_rows
from trak_core.scoring.solve import damped_solve
from trak_core.spec import TRAIN, Combine, ProjectionSpec, ScoresSpec, projection_of
from trak_core.stages._inputs import Damped
from trak_core.study.split import Split
from trak_core.study.targets import split_of
from trak_core.system.progress import software, with_progress

# Targets, from the first, and training samples of either sign for each.
_TARGETS, _EACH = 100, 10
_SIDES = ("train", "target")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Scores of pairs under one checkpoint, cut: each pair's tokens, and what is no token's.

    ``layers`` has shape (pairs, parameters); ``names`` are theirs.
    """

    tokens: list[np.ndarray]
    layers: np.ndarray
    names: list[str]


@dataclass(frozen=True, slots=True)
class _Side:
    """Samples to be cut, and the pairs that they are in, by place in the split."""

    split: Split
    vectors: np.ndarray
    pairs: Sequence[tuple[int, int]]


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
        check_made_for(file, spec, SCORES.rule)
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
    where = projecting_device(device)
    for number, checkpoint in enumerate(spec.checkpoints):
        own = spec.under(checkpoint)
        with (
            open_artifact(train_paths[number], FEATURES) as train,
            open_artifact(targets_paths[number], FEATURES) as target,
            open_artifact(normal_matrices[number], NORMAL_MATRIX) as matrix,
        ):
            check_made_for(train, own.of_train(), FEATURES.rule)
            check_made_for(target, own.of_targets(), FEATURES.rule)
            damped = Damped.read(matrix, train, own)
            phi = _rows(train, train_ids)
            target_phi = _rows(target, target_ids)
            known = {sample_id: i for i, sample_id in enumerate(train.ids("sample_ids"))}
            weights = train.vector("loss_weights")[[known[i] for i in train_ids]]
        lengths = np.ones(len(phi))
        if spec.normalize:
            lengths = np.linalg.norm(phi, axis=1)
            lengths[lengths == 0] = 1
            phi = unit_rows(phi)
        solved = damped_solve(
            damped.matrix, damped.ridge, damped.ends, np.concatenate([target_phi, phi]).T
        ).T
        powers.append(powered(weights, spec.loss_weight_power or 1.0))
        norms.append(damped.norm or 1.0)
        print(f"Checkpoint {checkpoint}: {len(top)} scores", flush=True)
        loaded = LoadedModel.load(study_file, checkpoints[number], own.of_train(), where)
        check_same(
            "checkpoints",
            train.spec["checkpoint"],
            loaded.file_spec(own.of_train(), {})["checkpoint"],
            checkpoints[number],
            FEATURES.rule,
        )
        projection = projection_of(own.of_train(), [p.shape for p in loaded.parameters.values()])
        data = (
            loaded.study.split(TRAIN, None).take(train_ids),
            split_of(loaded.study, str(spec.experiment), target_ids, question),
        )
        sides = (
            _Side(data[0], solved[: len(target_ids)], list(zip(rows, columns, strict=True))),
            _Side(data[1], solved[len(target_ids) :], list(zip(columns, rows, strict=True))),
        )
        found = [_cut(loaded, projection, side, batch_size, memory_mb) for side in sides]
        for cut, factors in zip(found, (1 / lengths[rows], np.ones(len(rows))), strict=True):
            cut.layers[:] *= factors[:, None]
            for tokens, factor in zip(cut.tokens, factors, strict=True):
                tokens *= factor
        cuts.append(found)
    assert spec.combine is not None
    counts = checkpoint_weights(np.stack(powers), np.array(norms), Combine(spec.combine))[:, rows]
    tokens, layers = _tables(top, cuts, counts)
    of_sides = (tokens.loc[tokens["side"] == side, :] for side in _SIDES)
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


def _n_tokens(batch: Batch, loaded: LoadedModel) -> int:
    """Return how many places a batch's texts have; 0 for what has no tokens of one kind."""
    if loaded.output.label_ndim == 1 and not loaded.output.takes_labels:
        return batch.labels.shape[1]
    if loaded.output.label_ndim == 0 and "input_ids" in batch.kwargs:
        return batch.kwargs["input_ids"].shape[1]
    return 0


def _cut(
    loaded: LoadedModel, projection: ProjectionSpec, side: _Side, batch_size: int, memory_mb: int
) -> _Cut:
    """Return the scores of one side's pairs under one checkpoint, by one pass over its samples."""
    vectors = torch.from_numpy(side.vectors * projection.scale).float().to(loaded.device)
    (samples,) = loaded.ordered(side.split)
    loaded = loaded.in_pieces(samples, memory_mb)
    few, _ = loaded.few(samples)
    # Directions of a parameter are made with the gradients, one at least, and scaled.
    most = 4 * max(p.numel() for p in loaded.parameters.values()) * (1 + bool(loaded.scales))
    needed = loaded.memory(few, max(0, memory_mb - most // 2**20)).mapped(
        lambda memory: replace(memory, shared_bytes=memory.shared_bytes + most)
    )
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    method = gradient_method(loaded.model, loaded.parameters, loaded.output, few)
    of_sample: dict[int, list[int]] = {}
    for number, (sample, _) in enumerate(side.pairs):
        of_sample.setdefault(sample, []).append(number)

    def computed(first: int, last: int) -> tuple[list[int], list[np.ndarray], np.ndarray]:
        batch = loaded.batch(samples, first, last)
        own = [of_sample.get(int(row), []) for row in samples.rows[first:last]]
        numbers = [number for some in own for number in some]
        own_places = [b for b, some in enumerate(own) for _ in some]
        places = torch.tensor(own_places, dtype=torch.long)
        directions = torch.tensor([side.pairs[n][1] for n in numbers], dtype=torch.long)
        n_tokens = _n_tokens(batch, loaded)
        pairs = Pairs(places.to(loaded.device), directions.to(loaded.device))
        given = loaded.parameters, projection, vectors, pairs, n_tokens, loaded.scales
        shares = Shares.zeros(*given)
        method(loaded.model, loaded.parameters, loaded.output, batch, shares)
        lengths = [n_tokens] * len(batch) if batch.lengths is None else batch.lengths.tolist()
        by_token = shares.by_token.cpu().numpy()
        # Padding has no share.
        tokens = [
            np.append(row[: lengths[b]], row[-1])
            for row, b in zip(by_token, places.tolist(), strict=True)
        ]
        return numbers, tokens, shares.by_parameter.cpu().numpy()

    tokens: list[np.ndarray] = [np.zeros(1)] * len(side.pairs)
    layers = np.zeros((len(side.pairs), len(loaded.parameters)))
    n_samples = len(side.split.ids)
    chunks = in_chunks(computed, n_samples, samples.batches_of(batch_size, room))
    for _, _, (numbers, some, by_parameter) in with_progress(chunks, n_samples, "samples"):
        layers[numbers] = by_parameter
        for number, row in zip(numbers, some, strict=True):
            tokens[number] = row
    return _Cut(tokens, layers, list(loaded.parameters))


def _tables(
    top: pd.DataFrame, cuts: Sequence[Sequence[_Cut]], counts: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return tables of tokens and of layers: sums over checkpoints, each by how it counts."""
    parts = []
    for side, name in enumerate(_SIDES):
        for number, count in enumerate(counts.T):
            total = sum(c * cut[side].tokens[number] for c, cut in zip(count, cuts, strict=True))
            parts.append((name, number, np.asarray(total)))
    lengths = [len(total) for _, _, total in parts]
    pairs = np.repeat([number for _, number, _ in parts], lengths)
    ids = {key: top[key].to_numpy()[pairs] for key in ("target_id", "train_id")}
    places = [place for n in lengths for place in _places(n)]
    tokens = pd.DataFrame({
        **ids,
        "side": np.repeat([name for name, _, _ in parts], lengths),
        "token": places,
        "score": np.concatenate([total for _, _, total in parts]),
    })
    own = [name.rpartition(".")[0] or name for name in cuts[0][0].names]
    names = list(dict.fromkeys(own))
    by_layer = np.zeros((len(top), len(names)))
    for count, cut in zip(counts, cuts, strict=True):
        for layer, column in zip(own, cut[0].layers.T, strict=True):
            by_layer[:, names.index(layer)] += count * column
    layers = pd.DataFrame({
        "target_id": top["target_id"].to_numpy().repeat(len(names)),
        "train_id": top["train_id"].to_numpy().repeat(len(names)),
        "layer": np.tile(np.array(names, dtype=object), len(top)),
        "score": by_layer.flatten(),
    })
    return tokens, layers


def _places(n: int) -> Iterator[int]:
    yield from range(n - 1)
    yield -1


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

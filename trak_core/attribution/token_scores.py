"""Split the scores of pairs of texts by the tokens of either text, and by parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from trak_core.attribution.device import Compute
from trak_core.attribution.fitted_checkpoint import DampedNormalMatrix
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.score_formulas import unit_rows
from trak_core.attribution.token_shares import Directions, Pairs, Shares
from trak_core.attribution.write_features import MethodOf, projection_for
from trak_core.gradients import Batch, in_chunks
from trak_core.gradients.gradient_terms import PIECE
from trak_core.runtime.progress import with_progress
from trak_core.settings import ProjectionSpec, ScoresSpec
from trak_core.study.dataset_split import Split

SIDES = ("train", "target")


@dataclass(frozen=True, slots=True)
class Cut:
    """Scores of pairs for one checkpoint, split by tokens of one of the texts and by parameters.

    ``tokens`` contains, for each pair, the scores of the tokens, then the score of terms that
    belong to no token. ``layers`` are the scores of the parameters ``names``, shape (pairs,
    parameters).
    """

    tokens: list[np.ndarray]
    layers: np.ndarray
    names: list[str]


def cut_pairs(
    loaded: LoadedModel,
    spec: ScoresSpec,
    damped: DampedNormalMatrix,
    splits: tuple[Split, Split],
    features: tuple[np.ndarray, np.ndarray],
    pairs: Sequence[tuple[int, int]],
    compute: Compute,
    method_of: MethodOf,
) -> tuple[Cut, Cut]:
    """Return scores of pairs, split by the tokens of training samples, and by those of targets.

    The score of a pair is <x, R v>, where R is the projection matrix. To split it by the tokens of
    one sample, x is that sample's gradient, and v = (N + ridge I)^-1 phi, where phi are the
    features of the other sample. Each sample is differentiated once.

    ``splits`` are n training samples and m targets, and ``features`` are their features, shapes
    (n, k) and (m, k), float64. A pair consists of the rows of a training sample and of a target.
    ``method_of`` chooses a gradient method that computes terms.
    """
    phi, target_phi = features
    lengths = np.ones(len(phi))
    if spec.normalize:
        lengths = np.linalg.norm(phi, axis=1)
        lengths[lengths == 0] = 1
        phi = unit_rows(phi)
    m = len(target_phi)
    solved = damped.solve(np.concatenate([target_phi, phi])).T
    projection = projection_for(loaded, spec.of_train())
    given = loaded, projection, compute, method_of
    train = _cut(*given, splits[0], solved[:m], pairs)
    targets = _cut(*given, splits[1], solved[m:], [(target, row) for row, target in pairs])
    # With `normalize`, the features of a training sample are divided by their length.
    pair_lengths = lengths[[row for row, _ in pairs]]
    train.layers[:] /= pair_lengths[:, None]
    for tokens, length in zip(train.tokens, pair_lengths, strict=True):
        tokens /= length
    return train, targets


def count_tokens(batch: Batch, loaded: LoadedModel) -> int:
    """Return the number of tokens of a batch's texts, with padding. 0 if samples are not texts."""
    if loaded.output.label_ndim == 1 and not loaded.output.takes_labels:
        return batch.labels.shape[1]
    if loaded.output.label_ndim == 0 and "input_ids" in batch.kwargs:
        return batch.kwargs["input_ids"].shape[1]
    return 0


def _cut(
    loaded: LoadedModel,
    projection: ProjectionSpec,
    compute: Compute,
    method_of: MethodOf,
    split: Split,
    solved: np.ndarray,
    side_pairs: Sequence[tuple[int, int]],
) -> Cut:
    """Return the scores of pairs, split by the tokens of the samples in ``split``.

    ``solved`` are the solved features of the samples paired with them, shape (rows, k). A pair
    consists of the row of a sample in ``split`` and a row of ``solved``.
    """
    memory_mb = compute.memory_mb
    vectors = torch.from_numpy(solved * projection.scale).float().to(loaded.device)
    (samples,) = loaded.ordered(split)
    loaded = loaded.in_pieces(samples, memory_mb)
    few, _ = loaded.few(samples)
    directions = Directions(loaded.parameters, projection, vectors, loaded.scales)
    # Memory besides gradients: the directions of one parameter for one vector and their scaled
    # copy, and the directions of small parameters for all vectors.
    sizes = [p.numel() for p in loaded.parameters.values()]
    direction_bytes = 4 * max(sizes) * (1 + bool(loaded.scales))
    direction_bytes += 4 * min(PIECE, len(vectors) * sum(sizes))
    needed = loaded.memory(few, max(0, memory_mb - direction_bytes // 2**20)).mapped(
        lambda memory: replace(memory, shared_bytes=memory.shared_bytes + direction_bytes)
    )
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    model = loaded.model, loaded.parameters, loaded.output
    method = method_of(loaded, few)
    pairs_of: dict[int, list[int]] = {}
    for number, (sample, _) in enumerate(side_pairs):
        pairs_of.setdefault(sample, []).append(number)

    def computed(first: int, last: int) -> tuple[list[int], list[np.ndarray], np.ndarray]:
        batch = loaded.batch(samples, first, last)
        in_batch = [pairs_of.get(int(row), []) for row in samples.rows[first:last]]
        numbers = [number for own in in_batch for number in own]
        positions = [b for b, own in enumerate(in_batch) for _ in own]
        vector_rows = [side_pairs[number][1] for number in numbers]
        pairs = Pairs(
            torch.tensor(positions, dtype=torch.long, device=loaded.device),
            torch.tensor(vector_rows, dtype=torch.long, device=loaded.device),
        )
        n_tokens = count_tokens(batch, loaded)
        shares = Shares(loaded.parameters, directions, pairs, n_tokens)
        method(*model, batch, shares)
        lengths = [n_tokens] * len(batch) if batch.lengths is None else batch.lengths.tolist()
        by_token = shares.by_token.cpu().numpy()
        # Padding has a score of 0 and is removed.
        tokens = [
            np.append(row[: lengths[b]], row[-1])
            for row, b in zip(by_token, positions, strict=True)
        ]
        return numbers, tokens, shares.by_parameter.cpu().numpy()

    tokens: list[np.ndarray] = [np.zeros(1)] * len(side_pairs)
    layers = np.zeros((len(side_pairs), len(loaded.parameters)))
    n_samples = len(split.ids)
    chunks = in_chunks(computed, n_samples, samples.batches_of(compute.batch_size, room))
    for _, _, (numbers, some, by_parameter) in with_progress(chunks, n_samples, "samples"):
        layers[numbers] = by_parameter
        for number, row in zip(numbers, some, strict=True):
            tokens[number] = row
    return Cut(tokens, layers, list(loaded.parameters))


def token_tables(
    top: pd.DataFrame, cuts: Sequence[Sequence[Cut]], weights: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of tokens and of layers, as weighted sums over checkpoints.

    ``top`` contains the ids of the pairs. ``cuts`` and ``weights``, shape (checkpoints, pairs), are
    results of ``cut_pairs`` and ``checkpoint_weights``.
    """
    totals = [
        np.sum([w * cut[side].tokens[pair] for w, cut in zip(own, cuts, strict=True)], axis=0)
        for side in range(len(SIDES))
        for pair, own in enumerate(weights.T)
    ]
    lengths = [len(total) for total in totals]
    rows = np.repeat(np.tile(np.arange(len(top)), len(SIDES)), lengths)
    tokens = pd.DataFrame({
        "target_id": top["target_id"].to_numpy()[rows],
        "train_id": top["train_id"].to_numpy()[rows],
        "side": np.repeat(np.repeat(SIDES, len(top)), lengths),
        "token": [token for n in lengths for token in (*range(n - 1), -1)],
        "score": np.concatenate(totals),
    })
    layer_of = [name.rpartition(".")[0] or name for name in cuts[0][0].names]
    layer_names = list(dict.fromkeys(layer_of))
    by_layer = np.zeros((len(top), len(layer_names)))
    for checkpoint_weights, cut in zip(weights, cuts, strict=True):
        for layer, column in zip(layer_of, cut[0].layers.T, strict=True):
            by_layer[:, layer_names.index(layer)] += checkpoint_weights * column
    layers = pd.DataFrame({
        "target_id": top["target_id"].to_numpy().repeat(len(layer_names)),
        "train_id": top["train_id"].to_numpy().repeat(len(layer_names)),
        "layer": np.tile(np.array(layer_names, dtype=object), len(top)),
        "score": by_layer.flatten(),
    })
    return tokens, layers

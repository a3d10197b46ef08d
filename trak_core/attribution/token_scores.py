"""Split the scores of pairs of texts by the tokens of either text, and by parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from trak_core.attribution.device import Compute
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.solve import DampedMatrix
from trak_core.attribution.token_shares import Directions, Pairs, Shares
from trak_core.attribution.write_features import projection_for
from trak_core.gradients import Batch, in_chunks
from trak_core.gradients.gradient_terms import PIECE
from trak_core.runtime.progress import with_progress
from trak_core.settings import ProjectionSpec, ScoresSpec
from trak_core.study.dataset_split import Split

SIDES = ("train", "target")


@dataclass(frozen=True, slots=True)
class Cut:
    """One checkpoint's scores of pairs, split by tokens and by layers.

    ``tokens`` contains, for each pair, the scores of the training sample's tokens, then the score
    of terms that belong to no token. For each pair, the scores of the target's tokens follow.
    ``layers`` contains the scores of each layer, shape (pairs,).
    """

    tokens: list[np.ndarray]
    layers: dict[str, np.ndarray]


def cut_pairs(
    loaded: LoadedModel,
    spec: ScoresSpec,
    damped: DampedMatrix,
    splits: tuple[Split, Split],
    features: tuple[np.ndarray, np.ndarray],
    pairs: Sequence[tuple[int, int]],
    compute: Compute,
) -> Cut:
    """Return scores of pairs, split by the tokens of training samples, and by those of targets.

    The score of a pair is <x, R v>, where R is the projection matrix. To split it by the tokens of
    one sample, x is that sample's gradient, and v = (N + ridge I)^-1 phi, where phi are the
    features of the other sample. Each sample is differentiated once.

    ``splits`` are n training samples and m targets, and ``features`` are their features, shapes
    (n, k) and (m, k), float64. A pair consists of the rows of a training sample and of a target.
    """
    (phi, target_phi), m = features, len(features[1])
    # With `normalize`, the features of a training sample are divided by their length.
    lengths = np.linalg.norm(phi, axis=1) if spec.normalize else np.ones(len(phi))
    lengths[lengths == 0] = 1
    solved = damped.solve(np.concatenate([target_phi, phi / lengths[:, None]]).T).T
    given = loaded, projection_for(loaded, spec.of_train()), compute
    tokens, by_parameter = _cut(*given, splits[0], solved[:m], pairs)
    of_targets, _ = _cut(*given, splits[1], solved[m:], [(target, row) for row, target in pairs])
    pair_lengths = lengths[[row for row, _ in pairs]]
    tokens = [values / length for values, length in zip(tokens, pair_lengths, strict=True)]
    layers: dict[str, np.ndarray] = {}
    for name, scores in zip(loaded.parameters, by_parameter.T, strict=True):
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, 0) + scores / pair_lengths
    return Cut(tokens + of_targets, layers)


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
    split: Split,
    solved: np.ndarray,
    side_pairs: Sequence[tuple[int, int]],
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return scores of pairs by the tokens of samples in ``split``, and by parameter.

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
    method = loaded.method_of(loaded, few, reads_terms=Shares.reads_terms)
    sample_of, vector_of = np.array(side_pairs).T
    tokens: list[np.ndarray] = [np.zeros(1)] * len(side_pairs)
    by_parameter = np.zeros((len(side_pairs), len(loaded.parameters)))

    def compute_batch(first: int, last: int) -> None:
        batch = loaded.batch(samples, first, last)
        # The position of each pair's sample in the batch, or -1.
        positions = np.full(len(samples), -1)
        positions[samples.rows[first:last]] = np.arange(last - first)
        positions = positions[sample_of]
        numbers = np.argsort(positions, kind="stable")[(positions < 0).sum() :]
        columns = positions[numbers], vector_of[numbers]
        pairs = Pairs(*(torch.from_numpy(column).to(loaded.device) for column in columns))
        n_tokens = count_tokens(batch, loaded)
        shares = Shares(loaded.parameters, directions, pairs, n_tokens)
        method(loaded.model, loaded.parameters, loaded.output, batch, shares)
        lengths = [n_tokens] * len(batch) if batch.lengths is None else batch.lengths.tolist()
        by_parameter[numbers] = shares.by_parameter.cpu().numpy()
        for number, row in zip(numbers, shares.by_token.cpu().numpy(), strict=True):
            # Padding has a score of 0 and is removed.
            tokens[number] = np.append(row[: lengths[positions[number]]], row[-1])

    n, at_once = len(samples), samples.batches_of(compute.batch_size, room)
    for _ in with_progress(in_chunks(compute_batch, n, at_once), n, "samples"):
        pass
    return tokens, by_parameter


def token_tables(
    top: pd.DataFrame, cuts: Sequence[Cut], weights: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of tokens and of layers, as weighted sums over checkpoints.

    ``top`` contains the ids of the pairs. ``cuts`` and ``weights``, shape (checkpoints, pairs), are
    results of ``cut_pairs`` and ``checkpoint_weights``.
    """
    totals = [
        np.sum([w * cut.tokens[i] for w, cut in zip(own, cuts, strict=True)], axis=0)
        for i, own in enumerate(np.tile(weights, len(SIDES)).T)
    ]
    lengths = [len(total) for total in totals]
    ids = top[["target_id", "train_id"]]
    tokens = pd.concat([ids.assign(side=side) for side in SIDES], ignore_index=True)
    tokens = tokens.loc[tokens.index.repeat(lengths)].reset_index(drop=True)
    tokens["token"] = [token for n in lengths for token in (*range(n - 1), -1)]
    tokens["score"] = np.concatenate(totals)
    names = list(cuts[0].layers)
    by_layer = np.zeros((len(names), len(top)))
    for own, cut in zip(weights, cuts, strict=True):
        by_layer += own * np.stack([*cut.layers.values()])
    layers = ids.loc[ids.index.repeat(len(names))].reset_index(drop=True)
    layers["layer"] = np.tile(np.array(names, dtype=object), len(top))
    layers["score"] = by_layer.T.flatten()
    return tokens, layers

"""Split scores of chosen pairs into shares of the tokens of either text, and of parameters."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from trak_core.attribution.fitted_checkpoint import DampedNormalMatrix
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.scores import unit_rows
from trak_core.attribution.token_shares import Directions, Pairs, Shares
from trak_core.attribution.write_features import projection_for
from trak_core.gradients import Batch, GradientMethod, gradient_method, in_chunks
from trak_core.gradients.gradient_terms import PIECE
from trak_core.spec import ProjectionSpec, ScoresSpec
from trak_core.study.dataset_split import Split
from trak_core.system.progress import with_progress

SIDES = ("train", "target")


@dataclass(frozen=True, slots=True)
class Cut:
    """Scores of pairs under one checkpoint, cut: each pair's tokens, and what is no token's.

    ``layers`` has shape (pairs, parameters); ``names`` are theirs.
    """

    tokens: list[np.ndarray]
    layers: np.ndarray
    names: list[str]


@dataclass(frozen=True, slots=True)
class Between:
    """Pairs of training samples and targets, and what their scores are made of.

    Attributes:
        train: Training samples, n of them.
        targets: Targets, m of them.
        solved_train: (N + lambda I)^-1 phi of the training samples, whose lengths may be 1, (n, k).
        solved_targets: Likewise of the targets, (m, k).
        lengths: What the training samples' gradients are divided by, (n,).
        pairs: Places of a training sample and of a target.
    """

    train: Split
    targets: Split
    solved_train: np.ndarray
    solved_targets: np.ndarray
    lengths: np.ndarray
    pairs: Sequence[tuple[int, int]]


def divided_by_lengths(phi: np.ndarray, *, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return training samples' features as scores take them, (n, k), and their ``lengths``, (n,).

    Lengths are 1 where scores aren't normalized, and where there is nothing to divide.
    """
    if not normalize:
        return phi, np.ones(len(phi))
    lengths = np.linalg.norm(phi, axis=1)
    lengths[lengths == 0] = 1
    return unit_rows(phi), lengths


def cut_pairs(
    loaded: LoadedModel,
    spec: ScoresSpec,
    damped: DampedNormalMatrix,
    splits: tuple[Split, Split],
    features: tuple[np.ndarray, np.ndarray],
    pairs: Sequence[tuple[int, int]],
    batch_size: int,
    memory_mb: int,
    method_of: Callable[[LoadedModel, Batch], GradientMethod] | None = None,
) -> tuple[Cut, Cut]:
    """Return one checkpoint's scores of pairs, cut by tokens; see ``cut_scores``.

    Args:
        loaded: The model under the checkpoint.
        spec: That of the checkpoint's scores.
        damped: The checkpoint's damped normal matrix.
        splits: Training samples, n of them, and m targets.
        features: Those of both, shapes (n, k) and (m, k), float64.
        pairs: Places of a training sample and of a target.
        batch_size: Samples in the model at once, at most.
        memory_mb: MiB for gradients and activations.
        method_of: As ``cut_scores`` takes it.
    """
    phi, lengths = divided_by_lengths(features[0], normalize=spec.normalize)
    solved = damped.solve(np.concatenate([features[1], phi])).T
    m = len(features[1])
    projection = projection_for(loaded, spec.of_train())
    between = Between(*splits, solved[m:], solved[:m], lengths, pairs)
    return cut_scores(loaded, projection, between, batch_size, memory_mb, method_of)


def cut_scores(
    loaded: LoadedModel,
    projection: ProjectionSpec,
    between: Between,
    batch_size: int,
    memory_mb: int,
    method_of: Callable[[LoadedModel, Batch], GradientMethod] | None = None,
) -> tuple[Cut, Cut]:
    """Return scores cut by the tokens of training samples, and by those of targets.

    A score is <x, R v>: x is the gradient of the sample whose tokens it is cut by, and v what was
    solved of the other. There is one pass over each side's samples. ``method_of`` chooses the way
    to gradients by a few samples, and must read terms; None for ``gradient_method``.
    """
    reverse = [(target, row) for row, target in between.pairs]
    given = batch_size, memory_mb, method_of or _compared
    of_train = _Side(between.train, between.solved_targets, between.pairs)
    of_targets = _Side(between.targets, between.solved_train, reverse)
    train, targets = (_cut(loaded, projection, side, *given) for side in (of_train, of_targets))
    # A unit row of features stands for x over its length.
    lengths = between.lengths[[row for row, _ in between.pairs]]
    train.layers[:] /= lengths[:, None]
    for tokens, length in zip(train.tokens, lengths, strict=True):
        tokens /= length
    return train, targets


@dataclass(frozen=True, slots=True)
class _Side:
    """Samples to be cut, and the pairs that they are in, by place in the split."""

    split: Split
    vectors: np.ndarray
    pairs: Sequence[tuple[int, int]]


def count_tokens(batch: Batch, loaded: LoadedModel) -> int:
    """Return how many places a batch's texts have; 0 for what has no tokens of one kind."""
    if loaded.output.label_ndim == 1 and not loaded.output.takes_labels:
        return batch.labels.shape[1]
    if loaded.output.label_ndim == 0 and "input_ids" in batch.kwargs:
        return batch.kwargs["input_ids"].shape[1]
    return 0


def _compared(loaded: LoadedModel, few: Batch) -> GradientMethod:
    given = loaded.model, loaded.parameters, loaded.output, few
    return gradient_method(*given, reads_terms=Shares.reads_terms)


def _cut(
    loaded: LoadedModel,
    projection: ProjectionSpec,
    side: _Side,
    batch_size: int,
    memory_mb: int,
    method_of: Callable[[LoadedModel, Batch], GradientMethod],
) -> Cut:
    """Return the scores of one side's pairs under one checkpoint, by one pass over its samples."""
    vectors = torch.from_numpy(side.vectors * projection.scale).float().to(loaded.device)
    (samples,) = loaded.ordered(side.split)
    loaded = loaded.in_pieces(samples, memory_mb)
    few, _ = loaded.few(samples)
    directions = Directions(loaded.parameters, projection, vectors, loaded.scales)
    # Directions of a parameter are made with the gradients, one at least, and scaled; some held.
    most = 4 * max(p.numel() for p in loaded.parameters.values()) * (1 + bool(loaded.scales))
    most += 4 * min(PIECE, len(vectors) * sum(p.numel() for p in loaded.parameters.values()))
    needed = loaded.memory(few, max(0, memory_mb - most // 2**20)).mapped(
        lambda memory: replace(memory, shared_bytes=memory.shared_bytes + most)
    )
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    model = loaded.model, loaded.parameters, loaded.output
    method = method_of(loaded, few)
    of_sample: dict[int, list[int]] = {}
    for number, (sample, _) in enumerate(side.pairs):
        of_sample.setdefault(sample, []).append(number)

    def computed(first: int, last: int) -> tuple[list[int], list[np.ndarray], np.ndarray]:
        batch = loaded.batch(samples, first, last)
        own = [of_sample.get(int(row), []) for row in samples.rows[first:last]]
        numbers = [number for some in own for number in some]
        own_places = [b for b, some in enumerate(own) for _ in some]
        places = torch.tensor(own_places, dtype=torch.long)
        asked = torch.tensor([side.pairs[n][1] for n in numbers], dtype=torch.long)
        n_tokens = count_tokens(batch, loaded)
        pairs = Pairs(places.to(loaded.device), asked.to(loaded.device))
        shares = Shares.zeros(loaded.parameters, directions, pairs, n_tokens)
        method(*model, batch, shares)
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
    return Cut(tokens, layers, list(loaded.parameters))


def token_tables(
    top: pd.DataFrame, cuts: Sequence[Sequence[Cut]], counts: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return tables of tokens and of layers: sums over checkpoints, each by how it counts."""
    parts = []
    for side, name in enumerate(SIDES):
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

"""Cut inner products of gradients with directions by tokens and parameters, as gradients come."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from trak_core.autograd.gradient_terms import (
    PIECE,
    Contribution,
    Dense,
    Lookup,
    Outer,
    summed_parts,
)
from trak_core.autograd.token_margins import BiasFactors, MarginFactors
from trak_core.gradients import Batch, gradient_method, in_chunks
from trak_core.model.loaded_model import LoadedModel
from trak_core.projection import Contractions, back_project
from trak_core.spec import ProjectionSpec, matrix_shape
from trak_core.study.split import Split
from trak_core.system.progress import with_progress

SIDES = ("train", "target")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which samples of a batch meet which directions, in the order of samples.

    Attributes:
        samples: Places in the batch, shape (pairs,).
        directions: Rows of the vectors, shape (pairs,).
    """

    samples: Tensor
    directions: Tensor

    def groups(self, pairs: Tensor | None = None) -> list[tuple[int, slice]]:
        """Return each sample with its place among the pairs, or among some of them, in order."""
        samples = self.samples if pairs is None else self.samples[pairs]
        own, sizes = samples.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        return [
            (sample, slice(end - size, end))
            for sample, size, end in zip(own.tolist(), sizes.tolist(), ends.tolist(), strict=True)
        ]


# Inner products of a sample's places with directions (n, entries): shape (n, places).
_Of = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one use of a parameter says of some tokens, from ``first`` on; None for no tokens."""

    first: int | None
    of: _Of


class Shares:
    """A consumer of gradients that adds up <x, R v> for pairs of a gradient x and a vector v.

    A parameter's direction R v is made when its gradients come, and none of a weight is formed: the
    factors of a gradient, sum_t a_t b_t^T, give the share a_t^T D b_t of the token t. For a tensor
    sketch no direction is made where it is cheaper to sketch each token's factors, once for all
    vectors. Entries of gradients are multiplied with ``scales``, by the parameter's name, if there
    are some; then there are directions.

    Attributes:
        by_token: Shape (pairs, tokens + 1), float64; at the end what belongs to no single token,
            such as the part of a table of positions.
        by_parameter: Shape (pairs, parameters), float64. Both have the same sums.
    """

    in_order: ClassVar[bool] = True
    reads_terms: ClassVar[bool] = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        vectors: Tensor,
        pairs: Pairs,
        by_token: Tensor,
        by_parameter: Tensor,
        scales: Mapping[str, Tensor] | None = None,
        contractions: Contractions | None = None,
    ):
        self._parameters, self._projection, self._scales = parameters, projection, scales
        self._vectors, self._pairs = vectors, pairs
        self.by_token, self.by_parameter = by_token, by_parameter
        self._contractions = contractions
        self._places: dict[int, tuple[int, int, int, str]] = {}
        offset = matrix = 0
        for number, (name, parameter) in enumerate(parameters.items()):
            self._places[id(parameter)] = offset, number, matrix, name
            offset += parameter.numel()
            matrix += parameter.numel() > 0

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        vectors: Tensor,
        pairs: Pairs,
        n_tokens: int,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return zeros for texts of ``n_tokens``; 0 for samples without tokens."""
        sizes = n_tokens + 1, len(parameters)
        by_token, by_parameter = (
            torch.zeros(len(pairs.samples), size, dtype=torch.float64, device=vectors.device)
            for size in sizes
        )
        given = parameters, projection, vectors, pairs, by_token, by_parameter, scales
        of_matrices = projection.kind.about.of_matrices
        return cls(*given, Contractions.of(projection, vectors) if of_matrices else None)

    @property
    def _n_tokens(self) -> int:
        return self.by_token.shape[1] - 1

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        n_entries = parameter.numel()
        if not n_entries:
            return
        offset, number, matrix, name = self._places[id(parameter)]
        shape = matrix_shape(parameter.shape)
        if self._contractions is not None and name not in (self._scales or {}):
            uses = [use for use in uses if not self._contract(use, shape, number, matrix)]
        if not uses:
            return
        used, places = self._pairs.directions.unique(return_inverse=True)
        step = max(1, PIECE // n_entries)
        for start in range(0, len(used), step):
            some = used[start : start + step]
            directions = back_project(self._vectors[some], self._projection, offset, n_entries)
            if self._scales is not None and name in self._scales:
                directions = directions * self._scales[name].flatten()
            (pairs,) = torch.where((places >= start) & (places < start + step))
            groups, own = self._pairs.groups(pairs), places[pairs] - start
            for use in uses:
                for part in self._parts(use, shape):
                    shares = [part.of(b, directions[own[rows]]) for b, rows in groups]
                    self._add_shares(part.first, torch.cat(shares), number, pairs)

    def _contract(
        self, use: Contribution, shape: tuple[int, int], number: int, matrix: int
    ) -> bool:
        """Add what a use's factors say, if it has some and they are cheaper to sketch."""
        assert self._contractions is not None
        pairs = self._pairs.groups(), self._pairs.directions
        if isinstance(use, Lookup) and use.matrix == shape:
            shares = self._contractions.with_lookups(matrix, use.indices, use.gradients[0], *pairs)
            self._add_shares(0 if self._are_tokens(use, use.indices) else None, shares, number)
            return True
        if isinstance(use, Outer) and use.matrix == shape:
            n_tokens, outers = use.inputs.shape[1], [use]
            has_tokens = self._are_tokens(use, use.inputs)
        elif isinstance(use, MarginFactors) and use.matrix == shape:
            n_tokens, outers = use.n_tokens, use.outers()
            has_tokens = n_tokens <= self._n_tokens
        else:
            return False
        sizes = use.n_rows, len(self._pairs.samples), n_tokens
        if not self._contractions.prefers_factors(*sizes, matrix):
            return False
        first = 0
        for outer in outers:
            left, right = outer.inputs, outer.gradients[0]
            left, right = (right, left) if outer.is_transposed else (left, right)
            shares = self._contractions.with_products(matrix, left, right, *pairs)
            self._add_shares(first if has_tokens else None, shares, number)
            first += shares.shape[1]
        return True

    def _add_shares(
        self, first: int | None, shares: Tensor, number: int, pairs: Tensor | None = None
    ) -> None:
        """Add shares of places from ``first`` on, or of no tokens; of some pairs, or of all."""
        rows = slice(None) if pairs is None else pairs
        shares = shares.double()
        sums = shares.sum(1)
        if first is None:
            self.by_token[rows, -1] += sums
        else:
            self.by_token[rows, first : first + shares.shape[1]] += shares
        self.by_parameter[rows, number] += sums

    def _parts(self, use: Contribution, shape: tuple[int, int]) -> Iterator[_Part]:
        """Yield what a use says of its places; of tokens, if there are as many."""
        if isinstance(use, MarginFactors | BiasFactors) and use.matrix == shape:
            of_weight = use.of_weight if isinstance(use, BiasFactors) else use
            first = 0
            for outer in use.outers():
                has_tokens = of_weight.n_tokens <= self._n_tokens
                yield _Part(first if has_tokens else None, _of_outer(outer, shape))
                first += outer.inputs.shape[1]
        elif isinstance(use, Outer) and use.matrix == shape:
            yield self._part(use, use.inputs, _of_outer(use, shape))
        elif isinstance(use, Lookup) and use.matrix == shape:
            yield self._part(use, use.indices, _of_lookup(use, shape))
        elif isinstance(use, Dense) and use.terms is not None:
            terms = use.terms()[0]
            # A parameter without dimensions has terms without any.
            terms = terms.reshape(*terms.shape[:2], shape[0] * shape[1]).float()
            yield self._part(use, terms, lambda own, d: d @ terms[own].T)
        else:
            for first, rows in summed_parts([use]):
                yield _Part(None, _of_rows(rows.float(), first))

    def _part(self, use: Contribution, places: Tensor, of: _Of) -> _Part:
        return _Part(0 if self._are_tokens(use, places) else None, of)

    def _are_tokens(self, use: Contribution, places: Tensor) -> bool:
        """Whether the places (batch, places, ...) of a use are tokens: if there are as many."""
        return 0 < places.shape[1] == self._n_tokens and not use.has_ranks

    def of(self, samples: slice) -> Self:
        ends = self._pairs.samples.new_tensor([samples.start, samples.stop])
        rows = slice(*torch.searchsorted(self._pairs.samples, ends).tolist())
        pairs = Pairs(self._pairs.samples[rows] - samples.start, self._pairs.directions[rows])
        return self._with(pairs, self.by_token[rows], self.by_parameter[rows])

    def empty(self) -> Self:
        totals = torch.zeros_like(self.by_token), torch.zeros_like(self.by_parameter)
        return self._with(self._pairs, *totals)

    def _with(self, pairs: Pairs, by_token: Tensor, by_parameter: Tensor) -> Self:
        given = self._parameters, self._projection, self._vectors, pairs
        return type(self)(*given, by_token, by_parameter, self._scales, self._contractions)

    def add(self, other: Self) -> None:
        self.by_token += other.by_token
        self.by_parameter += other.by_parameter

    def finish(self) -> None:
        return  # nothing is held back


def _of_outer(use: Outer, shape: tuple[int, int]) -> _Of:
    gradients = use.gradients[0]

    def of(sample: int, directions: Tensor) -> Tensor:
        matrices = directions.view(-1, *shape)
        matrices = matrices.mT if use.is_transposed else matrices
        return ((use.inputs[sample].float() @ matrices) * gradients[sample].float()).sum(-1)

    return of


def _of_lookup(use: Lookup, shape: tuple[int, int]) -> _Of:
    gradients = use.gradients[0]

    def of(sample: int, directions: Tensor) -> Tensor:
        rows = directions.view(-1, *shape)[:, use.indices[sample]]
        return (rows * gradients[sample].float()).sum(-1)

    return of


def _of_rows(rows: Tensor, first: int) -> _Of:
    part = slice(first, first + rows.shape[1])
    return lambda sample, directions: directions[:, part] @ rows[sample, :, None]


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


def cut_scores(
    loaded: LoadedModel,
    projection: ProjectionSpec,
    between: Between,
    batch_size: int,
    memory_mb: int,
) -> tuple[Cut, Cut]:
    """Return scores cut by the tokens of training samples, and by those of targets.

    A score is <x, R v>: x is the gradient of the sample whose tokens it is cut by, and v what was
    solved of the other. There is one pass over each side's samples.
    """
    reverse = [(target, row) for row, target in between.pairs]
    given = batch_size, memory_mb
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


def _cut(
    loaded: LoadedModel, projection: ProjectionSpec, side: _Side, batch_size: int, memory_mb: int
) -> Cut:
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
    model = loaded.model, loaded.parameters, loaded.output
    method = gradient_method(*model, few, reads_terms=Shares.reads_terms)
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
        n_tokens = count_tokens(batch, loaded)
        pairs = Pairs(places.to(loaded.device), directions.to(loaded.device))
        given = loaded.parameters, projection, vectors, pairs, n_tokens, loaded.scales
        shares = Shares.zeros(*given)
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

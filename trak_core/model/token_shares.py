"""Cut inner products of gradients with directions by tokens and parameters, as gradients come."""

import itertools
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
    """What one use of a parameter says of some tokens, from ``first`` on; None for no tokens.

    Attributes:
        of: Takes a sample and directions.
        terms: What they are multiplied with where it is formed, shape (batch, places, entries),
            from the parameter's entry ``entry`` on.
    """

    first: int | None
    of: _Of
    terms: Tensor | None = None
    entry: int = 0


def _of_terms(first: int | None, terms: Tensor, entry: int = 0) -> _Part:
    part = slice(entry, entry + terms.shape[2])
    return _Part(first, lambda sample, d: d[:, part] @ terms[sample].T, terms, entry)


class Directions:
    """Vectors v that gradients meet, as directions R v of each parameter, for all batches.

    Those of small parameters are made once, of at most ``PIECE`` entries together. Entries of
    gradients are multiplied with ``scales``, by the parameter's name, if there are some.

    Attributes:
        vectors: Shape (m, k), float32.
        contractions: For a tensor sketch, what takes factors of gradients instead.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        vectors: Tensor,
        scales: Mapping[str, Tensor] | None = None,
    ):
        self.vectors, self._projection = vectors, projection
        self._scales = {id(parameters[name]): scale for name, scale in (scales or {}).items()}
        of_matrices = projection.kind.about.of_matrices
        self.contractions = Contractions.of(projection, vectors) if of_matrices else None
        self._offsets: dict[int, int] = {}
        offset = 0
        for parameter in parameters.values():
            self._offsets[id(parameter)] = offset
            offset += parameter.numel()
        sizes = sorted(parameter.numel() for parameter in parameters.values())
        sums = (len(vectors) * total for total in itertools.accumulate(sizes))
        # Parameters of at most so many entries are held.
        self._most_held = max(
            (n for n, s in zip(sizes, sums, strict=True) if s <= PIECE), default=0
        )
        self._held: dict[int, Tensor] = {}

    def are_scaled(self, parameter: Tensor) -> bool:
        """Return whether a parameter's entries have scales."""
        return id(parameter) in self._scales

    def held(self, parameter: Tensor) -> Tensor | None:
        """Return all directions of a small parameter, shape (m, entries)."""
        if parameter.numel() > self._most_held:
            return None
        if id(parameter) not in self._held:
            self._held[id(parameter)] = self.of(parameter, slice(None))
        return self._held[id(parameter)]

    def of(self, parameter: Tensor, rows: Tensor | slice) -> Tensor:
        """Return the directions of some vectors, shape (vectors, entries)."""
        place = self._offsets[id(parameter)], parameter.numel()
        directions = back_project(self.vectors[rows], self._projection, *place)
        scale = self._scales.get(id(parameter))
        return directions if scale is None else directions * scale.flatten()


class Shares:
    """A consumer of gradients that adds up <x, R v> for pairs of a gradient x and a vector v.

    No gradient of a weight is formed: its factors, sum_t a_t b_t^T, give the share a_t^T D b_t of
    the token t, D the direction of v. For a tensor sketch no direction is made where it is cheaper
    to sketch each token's factors, once for all vectors.

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
        directions: Directions,
        pairs: Pairs,
        by_token: Tensor,
        by_parameter: Tensor,
    ):
        self._parameters, self._directions, self._pairs = parameters, directions, pairs
        self.by_token, self.by_parameter = by_token, by_parameter
        self._groups = pairs.groups()
        # Number among all, and among those with entries.
        self._places: dict[int, tuple[int, int]] = {}
        matrix = 0
        for number, parameter in enumerate(parameters.values()):
            self._places[id(parameter)] = number, matrix
            matrix += parameter.numel() > 0

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        directions: Directions,
        pairs: Pairs,
        n_tokens: int,
    ) -> Self:
        """Return zeros for texts of ``n_tokens``; 0 for samples without tokens."""
        by_token, by_parameter = (
            torch.zeros(len(pairs.samples), n, dtype=torch.float64, device=pairs.samples.device)
            for n in (n_tokens + 1, len(parameters))
        )
        return cls(parameters, directions, pairs, by_token, by_parameter)

    @property
    def _n_tokens(self) -> int:
        return self.by_token.shape[1] - 1

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel() or not self._groups:
            return
        number, matrix = self._places[id(parameter)]
        shape = matrix_shape(parameter.shape)
        contractions = self._directions.contractions
        if contractions is not None and not self._directions.are_scaled(parameter):
            uses = [u for u in uses if not self._contract(contractions, u, shape, number, matrix)]
        if not uses:
            return
        directions = self._directions.held(parameter)
        if directions is not None:
            for part in self._parts_of(uses, shape):
                self._add_shares(part.first, self._products(part, directions), number)
            return
        used, places = self._pairs.directions.unique(return_inverse=True)
        step = max(1, PIECE // parameter.numel())
        for start in range(0, len(used), step):
            directions = self._directions.of(parameter, used[start : start + step])
            (pairs,) = torch.where((places >= start) & (places < start + step))
            groups, own = self._pairs.groups(pairs), places[pairs] - start
            for part in self._parts_of(uses, shape):
                shares = [part.of(b, directions[own[rows]]) for b, rows in groups]
                self._add_shares(part.first, torch.cat(shares), number, pairs)

    def _products(self, part: _Part, directions: Tensor) -> Tensor:
        """Return inner products of a part with directions of all vectors, shape (pairs, places)."""
        asked, terms = self._pairs.directions, part.terms
        if terms is None:
            return torch.cat([part.of(b, directions[asked[rows]]) for b, rows in self._groups])
        directions = directions[:, part.entry : part.entry + terms.shape[2]]
        if terms.shape[1] == 1:
            return (terms[:, 0] @ directions.T)[self._pairs.samples, asked].unsqueeze(1)
        # Samples of fewer pairs than others get more, which don't count.
        most = max(rows.stop - rows.start for _, rows in self._groups)
        padded = asked.new_zeros(len(terms), most)
        ranks = torch.cat([torch.arange(rows.stop - rows.start) for _, rows in self._groups])
        places = self._pairs.samples, ranks.to(asked.device)
        padded[places] = asked
        return torch.bmm(directions[padded], terms.mT)[places]

    def _contract(
        self,
        contractions: Contractions,
        use: Contribution,
        shape: tuple[int, int],
        number: int,
        matrix: int,
    ) -> bool:
        """Add what a use's factors say, if it has some and they are cheaper to sketch."""
        pairs = self._groups, self._pairs.directions
        if isinstance(use, Lookup) and use.matrix == shape:
            shares = contractions.with_lookups(matrix, use.indices, use.gradients[0], *pairs)
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
        if not contractions.prefers_factors(*sizes, matrix):
            return False
        first = 0
        for outer in outers:
            left, right = outer.inputs, outer.gradients[0]
            left, right = (right, left) if outer.is_transposed else (left, right)
            shares = contractions.with_products(matrix, left, right, *pairs)
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

    def _parts_of(self, uses: Sequence[Contribution], shape: tuple[int, int]) -> Iterator[_Part]:
        return itertools.chain.from_iterable(self._parts(use, shape) for use in uses)

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
            yield _Part(self._first(use, use.inputs), _of_outer(use, shape))
        elif isinstance(use, Lookup) and use.matrix == shape:
            yield _Part(self._first(use, use.indices), _of_lookup(use, shape))
        elif isinstance(use, Dense) and use.terms is not None:
            terms = use.terms()[0]
            # A parameter without dimensions has terms without any.
            terms = terms.reshape(*terms.shape[:2], shape[0] * shape[1]).float()
            yield _of_terms(self._first(use, terms), terms)
        else:
            for first, rows in summed_parts([use], PIECE):
                yield _of_terms(None, rows.float().unsqueeze(1), first)

    def _first(self, use: Contribution, places: Tensor) -> int | None:
        return 0 if self._are_tokens(use, places) else None

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
        return type(self)(self._parameters, self._directions, pairs, by_token, by_parameter)

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
    directions = Directions(loaded.parameters, projection, vectors, loaded.scales)
    # Directions of a parameter are made with the gradients, one at least, and scaled; some held.
    most = 4 * max(p.numel() for p in loaded.parameters.values()) * (1 + bool(loaded.scales))
    most += 4 * min(PIECE, len(vectors) * sum(p.numel() for p in loaded.parameters.values()))
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
        asked = torch.tensor([side.pairs[n][1] for n in numbers], dtype=torch.long)
        n_tokens = count_tokens(batch, loaded)
        pairs = Pairs(places.to(loaded.device), asked.to(loaded.device))
        shares = Shares.zeros(loaded.parameters, directions, pairs, n_tokens)
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

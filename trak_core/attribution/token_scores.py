"""Split the score of a training text for a target text by tokens of either text, and by layers."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from trak_core.attribution.device import Compute
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import factors_of
from trak_core.attribution.solve import DampedMatrix
from trak_core.attribution.write_features import projection_for
from trak_core.gradients import Batch, in_chunks
from trak_core.gradients.gradient_terms import (
    PIECE,
    Consumer,
    Contribution,
    Dense,
    Lookup,
    Outer,
    summed_parts,
)
from trak_core.gradients.margins_in_pieces import BiasFactors, MarginFactors
from trak_core.projection import Contractions, back_project
from trak_core.runtime.progress import with_progress
from trak_core.settings import ProjectionSpec, ScoresSpec, matrix_shape
from trak_core.study.dataset_split import Split

SIDES = ("train", "target")


@dataclass(frozen=True, slots=True)
class SplitScores:
    """One checkpoint's scores of pairs of a training text and a target, by token and by layer.

    ``tokens`` contains two arrays for each pair. The first half of the arrays are the scores of the
    training texts' tokens, and the second half are those of the targets' tokens. The last entry of
    each array is the score of terms that belong to no token. ``layers`` contains the scores of each
    layer by its name, shape (pairs,).
    """

    tokens: list[np.ndarray]
    layers: dict[str, np.ndarray]


def split_pairs(
    loaded: LoadedModel,
    spec: ScoresSpec,
    damped: DampedMatrix,
    splits: tuple[Split, Split],
    features: tuple[np.ndarray, np.ndarray],
    pairs: np.ndarray,
    compute: Compute,
) -> SplitScores:
    """Return one checkpoint's scores of pairs, split by tokens and by layers.

    The score of a pair is <x, R v>, where x is the gradient of one sample of the pair, and R is the
    projection matrix. v = (N + ridge I)^-1 phi is computed from the normal matrix N and the
    features phi of the other sample. x is a sum of terms that belong to tokens, so the score is the
    sum of the inner products of these terms with R v. This is done for both samples of a pair. The
    gradient of each sample is computed once for all its pairs.

    ``splits`` are n training samples and m targets. ``features`` have shapes (n, k) and (m, k),
    float64. ``pairs`` are indices of training samples and of targets, shape (pairs, 2).
    """
    (phi, target_phi), m = features, len(features[1])
    # With `normalize`, the features of a training sample are divided by their norm.
    lengths = np.linalg.norm(phi, axis=1) if spec.normalize else np.ones(len(phi))
    lengths[lengths == 0] = 1
    solved = damped.solve(np.concatenate([target_phi, phi / lengths[:, None]]).T).T
    given = loaded, projection_for(loaded, spec.of_train()), compute
    tokens, by_parameter = _split_side(*given, splits[0], solved[:m], pairs)
    of_targets, _ = _split_side(*given, splits[1], solved[m:], pairs[:, ::-1])
    pair_lengths = lengths[pairs[:, 0]]
    tokens = [values / length for values, length in zip(tokens, pair_lengths, strict=True)]
    layers: dict[str, np.ndarray] = {}
    for name, scores in zip(loaded.parameters, by_parameter.T, strict=True):
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, 0) + scores / pair_lengths
    return SplitScores(tokens + of_targets, layers)


def count_tokens(batch: Batch, loaded: LoadedModel) -> int:
    """Return the number of tokens of each text with padding, or 0 if samples are not texts."""
    if loaded.output.label_ndim == 1 and not loaded.output.takes_labels:
        return batch.labels.shape[1]
    if loaded.output.label_ndim == 0 and "input_ids" in batch.kwargs:
        return batch.kwargs["input_ids"].shape[1]
    return 0


def _split_side(
    loaded: LoadedModel,
    projection: ProjectionSpec,
    compute: Compute,
    split: Split,
    solved: np.ndarray,
    side_pairs: np.ndarray,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the scores of pairs, split by the tokens of one sample of each pair, and by parameter.

    The samples whose tokens are scored are in ``split``. ``solved`` contains (N + ridge I)^-1 phi
    for the features phi of the pairs' other samples, shape (rows, k). A row of ``side_pairs``
    contains the index of a sample in ``split`` and the index of a row of ``solved``.
    """
    memory_mb = compute.memory_mb
    vectors = torch.from_numpy(solved * projection.scale).float().to(loaded.device)
    (samples,) = loaded.ordered(split)
    loaded = loaded.in_pieces(samples, memory_mb)
    few, _ = loaded.few(samples)
    directions = Directions(loaded.parameters, projection, vectors, loaded.scales)
    # Besides gradients, the memory must hold one direction of the largest parameter, a scaled copy
    # of it, and all directions of small parameters.
    sizes = [p.numel() for p in loaded.parameters.values()]
    direction_bytes = 4 * max(sizes) * (1 + bool(loaded.scales))
    direction_bytes += 4 * min(PIECE, len(vectors) * sum(sizes))
    needed = loaded.memory(few, max(0, memory_mb - direction_bytes // 2**20)).mapped(
        lambda memory: replace(memory, shared_bytes=memory.shared_bytes + direction_bytes)
    )
    with samples.naming_longest():
        room = needed.room(loaded.device, memory_mb)
    method = loaded.method_of(loaded, few, reads_terms=Shares.reads_terms)
    sample_of, vector_of = side_pairs.T
    tokens: list[np.ndarray] = [np.zeros(1)] * len(side_pairs)
    by_parameter = np.zeros((len(side_pairs), len(loaded.parameters)))

    def compute_batch(first: int, last: int) -> None:
        batch = loaded.batch(samples, first, last)
        # For each sample, its position in the batch, or -1 if it is not in the batch.
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
    top: pd.DataFrame, by_checkpoint: Sequence[SplitScores], weights: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table of the scores of tokens, and a table of the scores of layers.

    ``top`` contains the ids of the pairs. The scores of each checkpoint are multiplied by
    ``weights``, shape (checkpoints, pairs), and added up (see ``checkpoint_weights``).
    """
    totals = [
        np.sum([w * part.tokens[i] for w, part in zip(own, by_checkpoint, strict=True)], axis=0)
        for i, own in enumerate(np.tile(weights, len(SIDES)).T)
    ]
    lengths = [len(total) for total in totals]
    ids = top[["target_id", "train_id"]]
    tokens = pd.concat([ids.assign(side=side) for side in SIDES], ignore_index=True)
    tokens = tokens.loc[tokens.index.repeat(lengths)].reset_index(drop=True)
    tokens["token"] = [token for n in lengths for token in (*range(n - 1), -1)]
    tokens["score"] = np.concatenate(totals)
    names = list(by_checkpoint[0].layers)
    by_layer = np.zeros((len(names), len(top)))
    for own, part in zip(weights, by_checkpoint, strict=True):
        by_layer += own * np.stack([*part.layers.values()])
    layers = ids.loc[ids.index.repeat(len(names))].reset_index(drop=True)
    layers["layer"] = np.tile(np.array(names, dtype=object), len(top))
    layers["score"] = by_layer.T.flatten()
    return tokens, layers


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a sample of a batch and a vector, whose inner products are split by tokens.

    ``samples`` contains the sample of each pair as its position in the batch, in ascending order.
    ``vectors`` contains the vector of each pair as its row in the matrix of all vectors.
    """

    samples: Tensor
    vectors: Tensor

    def groups(self, pairs: Tensor | None = None) -> list[tuple[int, slice]]:
        """Return each sample that occurs, with the slice of its pairs.

        If ``pairs`` contains the numbers of some pairs, only these pairs are considered.
        """
        samples = self.samples if pairs is None else self.samples[pairs]
        distinct, sizes = samples.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        columns = torch.stack([distinct, ends - sizes, ends], dim=1).tolist()
        return [(sample, slice(start, end)) for sample, start, end in columns]


# A function (sample, directions) that returns the inner products of n directions, shape (n,
# entries), with the terms of the sample's gradient at each position. The result has shape (n,
# positions).
_Inner = Callable[[int, Tensor], Tensor]


class Directions:
    """The entries of R v that belong to each parameter, for the projection matrix R and vectors v.

    For each v, these entries are called a direction of the parameter. ``vectors`` has shape (m, k),
    float32. The directions of the smallest parameters are computed only once and kept if they have
    at most ``PIECE`` entries in total. ``scales`` are factors that multiply the entries of
    gradients, by parameter name.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        vectors: Tensor,
        scales: Mapping[str, Tensor] | None = None,
    ):
        self._vectors, self._projection = vectors, projection
        self._scales = {id(parameters[name]): scale for name, scale in (scales or {}).items()}
        of_matrices = projection.kind.about.of_matrices
        self._contractions = Contractions(projection, vectors) if of_matrices else None
        self._offsets: dict[int, int] = {}
        offset = 0
        for parameter in parameters.values():
            self._offsets[id(parameter)] = offset
            offset += parameter.numel()
        by_size = sorted(parameters.values(), key=Tensor.numel)
        sums = itertools.accumulate(len(vectors) * parameter.numel() for parameter in by_size)
        self._small = {id(p) for p, total in zip(by_size, sums, strict=True) if total <= PIECE}
        self._held: dict[int, Tensor] = {}

    def contractions_of(self, parameter: Tensor) -> Contractions | None:
        """Return ``Contractions`` to use instead of directions, or None if they cannot be used."""
        return None if id(parameter) in self._scales else self._contractions

    def rows_of(self, parameter: Tensor, rows: Tensor | slice) -> Tensor:
        """Return a parameter's directions for ``vectors[rows]``, shape (rows, entries)."""
        if id(parameter) not in self._small:
            return self._computed(parameter, rows)
        if id(parameter) not in self._held:
            self._held[id(parameter)] = self._computed(parameter, slice(None))
        return self._held[id(parameter)][rows]

    def _computed(self, parameter: Tensor, rows: Tensor | slice) -> Tensor:
        offset, n_entries = self._offsets[id(parameter)], parameter.numel()
        directions = back_project(self._vectors[rows], self._projection, offset, n_entries)
        scale = self._scales.get(id(parameter))
        return directions if scale is None else directions * scale.flatten()


class Shares(Consumer):
    """A consumer of gradients x that splits inner products <x, R v> into shares of tokens.

    R is the projection matrix. Each pair in ``pairs`` combines the gradient x of a sample with a
    vector v. The gradient of a weight matrix is the sum of outer products a_t b_t^T over tokens t,
    and is never formed. If the matrix D contains the entries of R v that belong to this weight, the
    share of token t is a_t^T D b_t. For a tensor sketch, D is not computed if it is cheaper to
    sketch a_t and b_t once for all vectors v. ``n_tokens`` is the number of tokens of a sample, or
    0 for samples that are not texts.

    Attributes:
        by_token: The shares of tokens, shape (pairs, tokens + 1), float64. The last column has the
            terms that belong to no single token, such as those of position embeddings.
        by_parameter: The shares of parameters, shape (pairs, parameters), float64.
    """

    reads_terms = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        directions: Directions,
        pairs: Pairs,
        n_tokens: int,
    ):
        self._directions, self._n_tokens = directions, n_tokens
        shapes = (len(pairs.samples), n_tokens + 1), (len(pairs.samples), len(parameters))
        device = pairs.samples.device
        self._set_pairs(pairs)
        self.begin([torch.zeros(s, dtype=torch.float64, device=device) for s in shapes])
        # The index of each parameter among all parameters and among those that are not empty.
        self._numbers: dict[int, tuple[int, int]] = {}
        matrix = 0
        for number, parameter in enumerate(parameters.values()):
            self._numbers[id(parameter)] = number, matrix
            matrix += parameter.numel() > 0

    def _set_pairs(self, pairs: Pairs) -> None:
        self._pairs, self._groups = pairs, pairs.groups()
        self._distinct = pairs.vectors.unique(return_inverse=True)

    def begin(self, totals: Sequence[Tensor]) -> None:
        super().begin(totals)
        self.by_token, self.by_parameter = totals

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel() or not self._groups:
            return
        number, matrix = self._numbers[id(parameter)]
        shape = matrix_shape(parameter.shape)
        contractions = self._directions.contractions_of(parameter)
        if contractions is not None:
            uses = [u for u in uses if not self._contract(contractions, u, shape, number, matrix)]
        if not uses:
            return
        used, indices = self._distinct
        step = max(1, PIECE // parameter.numel())
        for start in range(0, len(used), step):
            chunk = self._directions.rows_of(parameter, used[start : start + step])
            pairs, groups, in_chunk = slice(None), self._groups, indices
            if step < len(used):  # `where` waits for a GPU, so it is called only if needed.
                (pairs,) = torch.where((indices >= start) & (indices < start + step))
                groups, in_chunk = self._pairs.groups(pairs), indices[pairs] - start
            for first, inner in self._parts(uses, shape):
                shares = [inner(b, chunk[in_chunk[rows]]) for b, rows in groups]
                self._add_shares(first, torch.cat(shares), number, pairs)

    def _contract(
        self,
        contractions: Contractions,
        use: Contribution,
        shape: tuple[int, int],
        number: int,
        matrix: int,
    ) -> bool:
        """Return whether sketching outer products is cheaper. If it is, add their shares."""
        pairs = self._groups, self._pairs.vectors
        if isinstance(use, Lookup) and use.matrix == shape:
            shares = contractions.inner_with_lookups(matrix, use.indices, use.gradients[0], *pairs)
            self._add_shares(self._first(use, use.indices.shape[1]), shares, number)
            return True
        n_tokens, factors = factors_of(use, shape)
        sizes = use.n_rows, len(self._pairs.samples), n_tokens
        if not n_tokens or not contractions.prefers_factors(*sizes, matrix):
            return False
        first = self._first(use, n_tokens)
        for left, right in factors:
            shares = contractions.inner_with_products(matrix, left, right, *pairs)
            self._add_shares(first, shares, number)
            first = None if first is None else first + shares.shape[1]
        return True

    def _add_shares(
        self, first: int | None, shares: Tensor, number: int, rows: Tensor | slice = slice(None)
    ) -> None:
        """Add the shares of the tokens from number ``first`` on.

        If ``first`` is None, the shares belong to no token.
        """
        shares = shares.double()
        sums = shares.sum(1)
        if first is None:
            self.by_token[rows, -1] += sums
        else:
            self.by_token[rows, first : first + shares.shape[1]] += shares
        self.by_parameter[rows, number] += sums

    def _parts(
        self, uses: Sequence[Contribution], shape: tuple[int, int]
    ) -> Iterator[tuple[int | None, _Inner]]:
        """Yield parts of a parameter's gradient, each of which is a sum over positions in a sample.

        For each part, yield the number of the token at the first position, or None if positions are
        not tokens, and a function that computes the inner products of directions and terms.
        """
        for use in uses:
            if isinstance(use, MarginFactors | BiasFactors) and use.matrix == shape:
                weight = use.weight_factors if isinstance(use, BiasFactors) else use
                first = self._first(weight, weight.n_tokens)
                for outer in use.outers():
                    yield first, _of_outer(outer, shape)
                    first = None if first is None else first + outer.inputs.shape[1]
            elif isinstance(use, Outer) and use.matrix == shape:
                yield self._first(use, use.inputs.shape[1]), _of_outer(use, shape)
            elif isinstance(use, Lookup) and use.matrix == shape:
                yield self._first(use, use.indices.shape[1]), _of_lookup(use, shape)
            elif isinstance(use, Dense) and use.terms is not None:
                terms = use.terms()[0]
                # Terms of a scalar parameter have no last dimension. The new shape adds it.
                terms = terms.reshape(*terms.shape[:2], shape[0] * shape[1]).float()
                yield self._first(use, terms.shape[1]), _of_terms(terms)
            else:
                for entry, rows in summed_parts([use]):
                    yield None, _of_terms(rows.float().unsqueeze(1), entry)

    def _first(self, use: Contribution, n_positions: int) -> int | None:
        """Return 0, the number of the first token, or None if positions are not tokens."""
        if isinstance(use, MarginFactors):  # A causal model has fewer margins than tokens.
            return 0 if n_positions <= self._n_tokens else None
        return 0 if 0 < n_positions == self._n_tokens and not use.has_ranks else None

    def for_samples(self, samples: slice) -> Self:
        ends = self._pairs.samples.new_tensor([samples.start, samples.stop])
        rows = slice(*torch.searchsorted(self._pairs.samples, ends).tolist())
        other = super().for_samples(rows)
        other._set_pairs(
            Pairs(self._pairs.samples[rows] - samples.start, self._pairs.vectors[rows])
        )
        return other


def _of_terms(terms: Tensor, entry: int = 0) -> _Inner:
    """Return a function that computes inner products of directions and a sample's ``terms``.

    ``terms`` have shape (batch, positions, entries). They belong to consecutive entries of a
    parameter, which begin at index ``entry``. The directions have a column for each entry.
    """
    part = slice(entry, entry + terms.shape[2])
    return lambda sample, directions: directions[:, part] @ terms[sample].T


def _of_outer(use: Outer, shape: tuple[int, int]) -> _Inner:
    gradients = use.gradients[0]

    def inner(sample: int, directions: Tensor) -> Tensor:
        # <a_t b_t^T, D> = a_t^T D b_t for each position t
        matrices = directions.view(-1, *shape)
        matrices = matrices.mT if use.is_transposed else matrices
        return ((use.inputs[sample].float() @ matrices) * gradients[sample].float()).sum(-1)

    return inner


def _of_lookup(use: Lookup, shape: tuple[int, int]) -> _Inner:
    gradients = use.gradients[0]

    def inner(sample: int, directions: Tensor) -> Tensor:
        # A lookup of row i has the gradient e_i b_t^T. <e_i b_t^T, D> = <row i of D, b_t>.
        rows = directions.view(-1, *shape)[:, use.indices[sample]]
        return (rows * gradients[sample].float()).sum(-1)

    return inner

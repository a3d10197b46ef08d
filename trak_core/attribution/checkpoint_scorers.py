"""Score targets for one checkpoint, with the files that ``Attributor.fit`` or a run wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import Artifact, Rows
from trak_core.attribution.device import Compute
from trak_core.attribution.fitted_checkpoint import (
    DampedGradients,
    DampedNormalMatrix,
    ReadRows,
    read_rows,
    similarity_rows,
)
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.token_scores import Cut, count_tokens, cut_pairs
from trak_core.attribution.write_features import MethodOf, feature_blocks
from trak_core.config.memory_needs import exact_need
from trak_core.errors import InputError
from trak_core.settings import FeaturesSpec, ScoresSpec
from trak_core.study.dataset_split import Split

_COLUMNS = ("labels", "outputs", "predictions", "loss_weights")


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The implementation of ``Part`` in memory, with a function that returns rows of A_c."""

    rows: ReadRows
    vectors: Mapping[str, np.ndarray]
    norm: float

    def vector(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.vectors[key][start:stop]

    def scalar(self, key: str) -> float:
        assert key == "train_norm"
        return self.norm


def _columns(columns: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Return label numbers and ``PerSample.columns`` by name, as float32 or integer arrays."""
    arrays = [(c.float() if c.is_floating_point() else c).cpu().numpy() for c in columns]
    return dict(zip(_COLUMNS, arrays, strict=False))


def stored_columns(file: Artifact) -> dict[str, np.ndarray]:
    """Return the columns in a file of features or of a Gramian, by name."""
    return {key: file.vector(key) for key in _COLUMNS}


def _part(
    rows: ReadRows,
    train: tuple[Split, Mapping[str, np.ndarray]],
    targets: tuple[Split, Mapping[str, np.ndarray]],
    norm: float | None,
) -> MemoryPart:
    vectors: dict[str, Any] = {"loss_weights": train[1]["loss_weights"]}
    for side, (split, columns) in (("train", train), ("target", targets)):
        vectors[f"{side}_ids"] = np.array(split.ids)
        vectors |= {f"{side}_{key}": columns[key] for key in _COLUMNS[:3]}
    return MemoryPart(rows, vectors, norm or 1.0)


def target_features(
    loaded: LoadedModel, targets: Split, spec: FeaturesSpec, method_of: MethodOf, compute: Compute
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return targets' features, shape (m, k), rounded to the stored dtype, and their columns."""
    given = loaded, targets, spec, compute
    blocks = feature_blocks(*given, method_of=method_of, must_differ=False)
    _, _, features, columns = zip(*blocks, strict=True)
    return np.concatenate(features), _columns([torch.cat(c) for c in zip(*columns, strict=True)])


@dataclass(frozen=True, slots=True)
class ProjectedScorer:
    """Score by projected gradients. The features Phi_c are in a file or in memory."""

    loaded: LoadedModel
    spec: ScoresSpec
    damped: DampedNormalMatrix
    features: Rows | np.ndarray
    train: tuple[Split, Mapping[str, np.ndarray]]
    method_of: MethodOf

    @property
    def n_bytes(self) -> int:
        """Bytes of the training samples' features and of the factorization."""
        return self.features[:1].nbytes * len(self.features) + self.damped.damped.factor.nbytes

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return A_c = Phi_c (N + ridge I)^-1 T_c^T, with labels and outputs of the samples."""
        own = self.spec.features
        rows, columns = target_features(self.loaded, targets, own, self.method_of, compute)
        phi = read_rows(self.features, normalize=self.spec.normalize)
        solved = similarity_rows(phi, self.damped.solve(rows))
        return _part(solved, self.train, (targets, columns), self.damped.norm)

    def cut(
        self,
        train: Sequence[int],
        targets: Split,
        pairs: Sequence[tuple[int, int]],
        compute: Compute,
    ) -> tuple[Cut, Cut]:
        """Return scores of pairs, split by tokens of training samples and by tokens of targets.

        ``train`` contains rows of training samples. Pairs are positions in ``train`` and targets.
        """
        (samples,) = self.loaded.ordered(targets)
        if not count_tokens(self.loaded.batch(samples, 0, 1), self.loaded):
            raise InputError(
                "Scores can be split by tokens only if samples are texts. Found a target without "
                "tokens.",
                code="attribution.no_tokens",
            )
        spec, (split, _) = self.spec.features, self.train
        target_phi, _ = target_features(self.loaded, targets, spec, self.method_of, compute)
        phi = np.concatenate([self.features[row : row + 1] for row in train])
        splits = split.take([split.ids[row] for row in train]), targets
        features = phi.astype(np.float64), target_phi.astype(np.float64)
        given = self.loaded, self.spec, self.damped, splits, features, pairs, compute
        return cut_pairs(*given, partial(self.method_of, reads_terms=True))


@dataclass(frozen=True, slots=True)
class ExactScorer:
    """Score by inner products of gradients. Each call differentiates all training samples."""

    loaded: LoadedModel
    spec: FeaturesSpec
    gradients: DampedGradients
    train: tuple[Split, Mapping[str, np.ndarray]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the Gramian and of its factorization."""
        return 2 * self.gradients.damped.gramian.nbytes

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return A_c of ``DampedGradients``, with labels and outputs of the samples."""
        train, _ = self.train
        n_rows = len(self.gradients.damped.gramian)
        exact_need(n_rows, len(targets.ids)).check(compute.memory_mb)
        if not self.loaded.reproduces(*self.train):
            raise InputError(
                "With `projection: exact`, `fit` and `score` must use the same training samples "
                "and model. Found different model outputs. Call `fit` again.",
                code="attribution.changed_data",
            )
        cross, columns = inner_products(self.loaded, train, targets, self.spec, compute)
        values = self.gradients.similarities(cross).astype(np.float32)
        own = targets, _columns(columns)
        return _part(lambda start, stop: values[start:stop], self.train, own, self.gradients.norm)


Scorer = ProjectedScorer | ExactScorer

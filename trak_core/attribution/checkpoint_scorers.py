"""Score targets under one checkpoint in memory, by what ``Attributor.fit`` or a run has kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import Artifact, Rows
from trak_core.attribution.fitted_checkpoint import (
    DampedGradients,
    DampedNormalMatrix,
    ReadRows,
    read_rows,
    similarity_rows,
)
from trak_core.attribution.gauss_newton_scores import newton_scores
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.token_scores import Cut, count_tokens, cut_pairs
from trak_core.attribution.write_features import MethodOf, feature_blocks
from trak_core.config.memory_needs import exact_need
from trak_core.errors import InputError
from trak_core.spec import FeaturesSpec, ScoresSpec
from trak_core.study.dataset_split import Split

_COLUMNS = ("labels", "outputs", "predictions", "loss_weights")


@dataclass(frozen=True, slots=True)
class Compute:
    """Where and how much is computed at once; nothing here changes numbers beyond rounding.

    Attributes:
        batch_size: Samples in the model at once, at most.
        memory_mb: MiB for arrays.
        threads: CPU threads of the projection.
    """

    device: torch.device
    batch_size: int
    memory_mb: int
    threads: int


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One checkpoint's scores before they are combined, in memory.

    Attributes:
        rows: Rows of A_c, shape (rows, m).
        vectors: One value a sample, by the names that files have.
        norm: ||B||; 1 where scores are not divided by it.
    """

    rows: ReadRows
    vectors: Mapping[str, np.ndarray]
    norm: float

    def vector(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return one value a sample."""
        return self.vectors[key][start:stop]

    def scalar(self, key: str) -> float:
        """Return ||B||, the only number."""
        assert key == "train_norm"
        return self.norm


def _columns(columns: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Return label numbers and ``PerSample.columns`` as NumPy arrays, float32 or integers."""
    arrays = [(c.float() if c.is_floating_point() else c).cpu().numpy() for c in columns]
    return dict(zip(_COLUMNS, arrays, strict=False))


def stored_columns(file: Artifact) -> dict[str, np.ndarray]:
    """Return the same of a file of features or inner products."""
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
    """Return features of targets as they read after they were stored, (m, k), and their columns."""
    blocks = feature_blocks(
        loaded,
        targets,
        spec,
        method_of=method_of,
        batch_size=compute.batch_size,
        memory_mb=compute.memory_mb,
        threads=compute.threads,
        must_differ=False,
    )
    features, columns = [], []
    for _, _, rows, own in blocks:
        features.append(rows)
        columns.append(own)
    whole = [torch.cat(parts) for parts in zip(*columns, strict=True)]
    return np.concatenate(features), _columns(whole)


@dataclass(frozen=True, slots=True)
class ProjectedScorer:
    """Scores by projected gradients.

    Attributes:
        features: Phi_c, shape (n, k), stored or in memory.
        train: The training samples, and their columns.
    """

    loaded: LoadedModel
    spec: ScoresSpec
    damped: DampedNormalMatrix
    features: Rows | np.ndarray
    train: tuple[Split, Mapping[str, np.ndarray]]
    method_of: MethodOf

    @property
    def n_bytes(self) -> int:
        """Size of the training samples' features and the factor, in memory."""
        return self.features[:1].nbytes * len(self.features) + self.damped.damped.factor.nbytes

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return A_c = Phi_c (N + ridge I)^-1 T_c^T and what goes with each sample."""
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
        """Return scores of pairs cut by the tokens of training samples, and by those of targets.

        ``train`` are rows of training samples; pairs are places among these and among the targets.
        """
        (samples,) = self.loaded.ordered(targets)
        if not count_tokens(self.loaded.batch(samples, 0, 1), self.loaded):
            raise InputError(
                "Samples must be texts for scores to be cut by tokens. Found a target without "
                "tokens. Take the scores alone.",
                code="attribution.no_tokens",
            )
        own, (split, _) = self.spec.features, self.train
        of_targets, _ = target_features(self.loaded, targets, own, self.method_of, compute)
        phi = np.concatenate([self.features[row : row + 1] for row in train])
        splits = split.take([split.ids[row] for row in train]), targets
        features = phi.astype(np.float64), of_targets.astype(np.float64)
        sizes = compute.batch_size, compute.memory_mb
        return cut_pairs(self.loaded, self.spec, self.damped, splits, features, pairs, *sizes)


@dataclass(frozen=True, slots=True)
class ExactScorer:
    """Scores by inner products of gradients; training samples are differentiated for each call."""

    loaded: LoadedModel
    gradients: DampedGradients
    train: tuple[Split, Mapping[str, np.ndarray]]

    @property
    def n_bytes(self) -> int:
        """Size of the Gramian and of its factor."""
        return 2 * self.gradients.damped.gramian.nbytes

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return A_c = (K W + ridge I)^-1 K_t and what goes with each sample."""
        train, _ = self.train
        exact_need(len(train.ids), len(targets.ids)).check(compute.memory_mb)
        if not self.loaded.reproduces(*self.train):
            raise InputError(
                "Training samples and the model must be the same in `fit` and in `score`, which "
                "differentiates them again with `projection: exact`. Found other model outputs.",
                code="attribution.changed_data",
            )
        sizes = compute.batch_size, compute.memory_mb
        cross, columns = inner_products(self.loaded, train, targets, *sizes)
        values = self.gradients.similarities(cross).astype(np.float32)
        own = targets, _columns(columns)
        return _part(lambda start, stop: values[start:stop], self.train, own, self.gradients.norm)


@dataclass(frozen=True, slots=True)
class NewtonScorer:
    """Scores by the Gauss-Newton matrix of the training loss; nothing is kept between calls."""

    loaded: LoadedModel
    damping: float
    train: Split

    n_bytes: ClassVar[int] = 0

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return A_c of ``newton_scores`` and what goes with each sample."""
        sizes = compute.batch_size, compute.memory_mb
        result = newton_scores(self.loaded, self.train, targets, self.damping, *sizes)
        values, own = result.values.astype(np.float32), (targets, _columns(result.targets))
        train = self.train, _columns(result.train)
        return _part(lambda start, stop: values[start:stop], train, own, None)


Scorer = ProjectedScorer | ExactScorer | NewtonScorer

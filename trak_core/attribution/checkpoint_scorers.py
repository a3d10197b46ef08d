"""Score targets for one checkpoint, with the files that ``Attributor.fit`` or a run wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import Artifact, Rows
from trak_core.attribution.device import Compute
from trak_core.attribution.fitted_checkpoint import (
    DampedGradients,
    MemoryPart,
    read_rows,
    similarity_rows,
)
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.solve import DampedMatrix
from trak_core.attribution.token_scores import Cut, count_tokens, cut_pairs
from trak_core.attribution.write_features import feature_blocks
from trak_core.config.memory_needs import exact_need
from trak_core.errors import InputError
from trak_core.settings import ScoresSpec
from trak_core.study.dataset_split import Split

_COLUMNS = ("labels", "outputs", "predictions", "loss_weights")


def stored_columns(file: Artifact) -> dict[str, np.ndarray]:
    """Return the columns in a file of features or of a Gramian, by name."""
    return {key: file.vector(key) for key in _COLUMNS}


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded checkpoint, and the results of ``Attributor.fit`` for its training samples.

    Attributes:
        train: The training samples.
        columns: Their ``stored_columns``.
        norm: The norm ||B||, or None if scores are not divided by it.
        damped: The factorized matrix N + ridge I, or the damped Gramian for exact scores.
        features: Phi_c, in a file or in memory. None for exact scores.
    """

    loaded: LoadedModel
    spec: ScoresSpec
    train: Split
    columns: Mapping[str, np.ndarray]
    norm: float | None
    damped: DampedMatrix | DampedGradients
    features: Rows | np.ndarray | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the model, the factorization, and the features or the Gramian."""
        tensors = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        if isinstance(self.damped, DampedGradients):
            return n_bytes + 2 * self.damped.damped.gramian.nbytes
        assert self.features is not None
        return n_bytes + self.features[:1].nbytes * len(self.features) + self.damped.factor.nbytes

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return A_c, with labels, outputs and predictions of all samples.

        A_c is Phi_c (N + ridge I)^-1 T_c^T. For exact scores, it is that of ``DampedGradients``,
        and each call differentiates all training samples.
        """
        if isinstance(self.damped, DampedGradients):
            values, columns = self._exact(targets, self.damped, compute)
            rows = read_rows(values)
        else:
            assert self.features is not None
            target_phi, columns = self._target_features(targets, compute)
            phi = read_rows(self.features, normalize=self.spec.normalize)
            rows = similarity_rows(phi, self.damped.solve(target_phi.T))
        arrays = [(c.float() if c.is_floating_point() else c).cpu().numpy() for c in columns]
        own = dict(zip(_COLUMNS, arrays, strict=False))
        vectors = {"loss_weights": self.columns["loss_weights"]}
        for side, split, values in (("train", self.train, self.columns), ("target", targets, own)):
            vectors[f"{side}_ids"] = np.array(split.ids)
            vectors |= {f"{side}_{key}": values[key] for key in _COLUMNS[:3]}
        return MemoryPart(rows, vectors, self.norm or 1.0)

    def _exact(
        self, targets: Split, gradients: DampedGradients, compute: Compute
    ) -> tuple[np.ndarray, list[Tensor]]:
        """Return exact A_c, shape (n, m), float32, and the targets' columns."""
        exact_need(len(gradients.damped.gramian), len(targets.ids)).check(compute.memory_mb)
        if not self.loaded.reproduces(self.train, self.columns):
            raise InputError(
                "With `projection: exact`, `fit` and `score` must use the same training samples "
                "and model. Found different model outputs. Call `fit` again.",
                code="attribution.changed_data",
            )
        given = self.loaded, self.train, targets, self.spec.features, compute
        cross, columns = inner_products(*given)
        return gradients.similarities(cross).astype(np.float32), columns

    def _target_features(self, targets: Split, compute: Compute) -> tuple[np.ndarray, list[Tensor]]:
        """Return targets' features (m, k), rounded to the stored dtype, as float64, and columns."""
        given = self.loaded, targets, self.spec.features, compute
        _, _, features, columns = zip(*feature_blocks(*given, must_differ=False), strict=True)
        joined = [torch.cat(parts) for parts in zip(*columns, strict=True)]
        return np.concatenate(features).astype(np.float64), joined

    def cut(
        self,
        train: Sequence[int],
        targets: Split,
        pairs: Sequence[tuple[int, int]],
        compute: Compute,
    ) -> Cut:
        """Return the result of ``cut_pairs`` for rows ``train`` of training samples, and targets.

        Pairs are positions in ``train`` and targets.
        """
        assert isinstance(self.damped, DampedMatrix)
        assert self.features is not None
        (samples,) = self.loaded.ordered(targets)
        if not count_tokens(self.loaded.batch(samples, 0, 1), self.loaded):
            raise InputError(
                "Scores can be split by tokens only if samples are texts. Found a target without "
                "tokens.",
                code="attribution.no_tokens",
            )
        target_phi, _ = self._target_features(targets, compute)
        phi = np.concatenate([self.features[row : row + 1] for row in train]).astype(np.float64)
        splits = self.train.take([self.train.ids[row] for row in train]), targets
        given = self.loaded, self.spec, self.damped, splits, (phi, target_phi), pairs, compute
        return cut_pairs(*given)

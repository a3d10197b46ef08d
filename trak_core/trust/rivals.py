"""What scores are measured beside, as sums over subsets: other settings, baselines; arrays only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from trak_core.config.sweep import Setting
from trak_core.scoring.directions import unit_rows
from trak_core.scoring.solve import Spectrum, mean_squared_norm, train_norm
from trak_core.scoring.weights import powered
from trak_core.spec import Combine
from trak_core.trust.subset_sums import Blocks, damped_sums, weighted_sums

# A row of the summary: method, kind, proj_dim (0 where there is none).
Key = tuple[str, str, int]

_TRACIN = (1.0, Combine.AVERAGE_OF_PRODUCTS)
# Of the random baseline.
_SEED = 0


def label_sums(masks: np.ndarray, labels: np.ndarray, own: np.ndarray, block: int) -> np.ndarray:
    """Return the sums of 1 for training samples of the target's label, and 0 for others.

    Args:
        masks: 1 where a subset has a sample, shape (S, n), float64.
        labels: Of the training samples, shape (n,).
        own: Of the targets, shape (m,).
        block: Training samples at once.

    Returns:
        Shape (S, m), float64.
    """
    sums = np.zeros((len(masks), len(own)))
    for start in range(0, len(labels), block):
        rows = slice(start, start + block)
        sums += masks[:, rows] @ (labels[rows, None] == own)
    return sums


def random_sums(masks: np.ndarray, n_targets: int, block: int) -> np.ndarray:
    """Return the sums of normal numbers, shape (S, m): what means nothing."""
    rng = np.random.default_rng(_SEED)
    sums = np.zeros((len(masks), n_targets))
    for start in range(0, masks.shape[1], block):
        part = masks[:, start : start + block]
        sums += part @ rng.standard_normal((part.shape[1], n_targets))
    return sums


def cosine_sums(masks: np.ndarray, train: Blocks, targets: np.ndarray) -> np.ndarray:
    """Return the sums of cosines between embeddings under one checkpoint.

    Args:
        masks: Shape (S, n), float64.
        train: Start, stop and embeddings (rows, width) of every block of training samples.
        targets: Embeddings, shape (m, width).

    Returns:
        Shape (S, m), float64; a zero embedding has cosine 0 with everything.
    """
    sums = np.zeros((len(masks), targets.shape[1]))
    for start, stop, rows in train:
        sums += masks[:, start:stop] @ unit_rows(rows)
    return sums @ unit_rows(targets).T


def average_weights(
    settings: Sequence[Setting], loss_weights: Sequence[np.ndarray]
) -> dict[float, np.ndarray]:
    """Return the loss weights averaged over checkpoints, for every power that is asked for.

    Args:
        settings: Of a sweep.
        loss_weights: Q of every checkpoint, each of shape (n,).
    """
    powers = sorted({setting.loss_weight_power for setting in settings})
    return {p: np.mean([powered(q, p) for q in loss_weights], axis=0) for p in powers}


@dataclass(frozen=True, slots=True)
class FeatureRivals:
    """What comes straight from features, to be added up over checkpoints.

    Attributes:
        settings: Of a sweep.
        gradient_dot: proj_dim of inner products of gradients, weighted by Q; None for none.
        averages: From ``average_weights``.
    """

    settings: Sequence[Setting]
    gradient_dot: int | None
    averages: Mapping[float, np.ndarray]

    @property
    def powers(self) -> list[float]:
        """Powers of the loss weights that the settings ask for."""
        return sorted({setting.loss_weight_power for setting in self.settings})

    def sums(
        self,
        masks: np.ndarray,
        loss_weights: np.ndarray,
        normal_weights: Mapping[float, np.ndarray],
        train: Blocks,
        targets: np.ndarray,
    ) -> dict[Key | Setting, np.ndarray]:
        """Return one checkpoint's share of the sums of each rival, shape (S, m), float64.

        Args:
            masks: Shape (S, n), float64.
            loss_weights: Q of the training samples, shape (n,).
            normal_weights: The diagonal of W, shape (n,), for every power of loss weights.
            train: Start, stop and features (rows, k) of every block of training samples.
            targets: Features, shape (m, k), float64.
        """
        asked = [_TRACIN] if self.gradient_dot is not None else []
        weightings = list(dict.fromkeys([*(s.weighting for s in self.settings), *asked]))
        weights = [
            self.averages[power]
            if combine is Combine.PRODUCT_OF_AVERAGES
            else powered(loss_weights, power)
            for power, combine in weightings
        ]
        ways = _Ways.of(self.powers, loss_weights, normal_weights)
        sums, gramians = weighted_sums(masks, weights, train, ways.squared)
        found: dict[Key | Setting, np.ndarray] = {}
        for dim in sorted({setting.proj_dim for setting in self.settings}):
            first = [gramian[:dim, :dim] for gramian in gramians]
            for powers in ways.together:
                found |= self._solved(dim, powers, weightings, ways, sums, first, targets)
        if self.gradient_dot is not None:
            of_products = sums[weightings.index(_TRACIN)]
            found["gradient_dot", "baseline", self.gradient_dot] = of_products @ targets.T
        return found

    def _solved(
        self,
        dim: int,
        powers: Sequence[float],
        weightings: Sequence[tuple[float, Combine]],
        ways: "_Ways",
        sums: np.ndarray,
        gramians: Sequence[np.ndarray],
        targets: np.ndarray,
    ) -> dict[Key | Setting, np.ndarray]:
        """Return the sums of the settings that share a proj_dim and a normal matrix."""
        settings = [s for s in self.settings if s.proj_dim == dim and s.loss_weight_power in powers]
        used = [i for i, (power, _) in enumerate(weightings) if power in powers]
        dampings = sorted({setting.damping for setting in settings})
        normal = gramians[ways.normal[powers[0]]]
        lambdas = [
            damping * mean_squared_norm(normal, len(ways.squared[0])) for damping in dampings
        ]
        spectrum = Spectrum.of(normal)
        solved = damped_sums(sums[used, :, :dim], spectrum, lambdas, targets[:, :dim])
        found: dict[Key | Setting, np.ndarray] = {}
        products: dict[float, np.ndarray] = {}
        for setting in settings:
            power, i = setting.loss_weight_power, dampings.index(setting.damping)
            share = solved[i, used.index(weightings.index(setting.weighting))]
            if setting.combine is Combine.UNIT_AVERAGE:
                if power not in products:
                    both = gramians[ways.weighted[power]], gramians[ways.plain]
                    products[power] = spectrum.norm_products(*both)
                share = share / train_norm(spectrum.eigenvalues, products[power], lambdas[i])
            found[setting] = share
        return found


@dataclass(frozen=True, slots=True)
class _Ways:
    """Ways to weigh rows in the k x k products that the settings need, each once.

    Attributes:
        squared: The weights, each of shape (n,).
        together: Powers of loss weights that share a normal matrix.
        normal: By power, which of ``squared`` is the diagonal of W.
        weighted: By power, which is |Q|^(2 power).
        plain: Which is 1.
    """

    squared: list[np.ndarray]
    together: list[list[float]]
    normal: dict[float, int]
    weighted: dict[float, int]
    plain: int = 0

    @classmethod
    def of(
        cls,
        powers: Sequence[float],
        loss_weights: np.ndarray,
        normal_weights: Mapping[float, np.ndarray],
    ) -> Self:
        """Return the ways of some powers; none for none."""
        if not powers:
            return cls([], [], {}, {})
        squared = [np.ones(len(loss_weights))]
        weighted = {power: i for i, power in enumerate(powers, 1)}
        squared += [powered(loss_weights, power) ** 2 for power in powers]
        normal: dict[float, int] = {}
        together: list[list[float]] = []
        for power in powers:
            diagonal = normal_weights[power]
            alike = [i for i, one in enumerate(squared) if np.array_equal(one, diagonal)]
            normal[power] = alike[0] if alike else len(squared)
            squared += [] if alike else [diagonal]
            same = [powers for powers in together if normal[powers[0]] == normal[power]]
            if same:
                same[0].append(power)
            else:
                together.append([power])
        return cls(squared, together, normal, weighted)

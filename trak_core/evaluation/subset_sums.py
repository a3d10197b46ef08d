"""Sum scores over subsets of training samples, for settings of scoring to compare; NumPy only.

A subset sum adds up a target's scores over the training samples of a subset. It is linear in the
rows of Phi_c: with masks M (S, n), weights w (n,) and solved targets X_c (k, m) the sums are
((M * w) Phi_c) X_c. The first factor is made once and serves every damping, and n x m scores are
never formed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.attribution.scores import powered
from trak_core.attribution.solve import Spectrum, mean_squared_norm, train_norm, weighted_gramians
from trak_core.spec import Combine, Setting

# A row of the summary: method, kind, proj_dim (0 where there is none).
Key = tuple[str, str, int]
# Start, stop and rows of every block of training samples, in order.
Blocks = Iterable[tuple[int, int, np.ndarray]]
ReadRows = Callable[[int, int], np.ndarray]


def read_blocks(read: ReadRows, n_rows: int, block: int) -> Blocks:
    """Yield all rows that ``read(start, stop)`` gives, ``block`` of them at a time."""
    for start in range(0, n_rows, block):
        stop = min(start + block, n_rows)
        yield start, stop, read(start, stop)


def subset_sums(masks: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Return the sum of each subset's rows, (S, m), float64: ``masks @ rows``, block by block.

    Masks are 1 where a subset has a training sample, of shape (S, n), float64.
    """
    total = np.zeros(())
    for start, stop, rows in blocks:
        total = total + masks[:, start:stop] @ rows
    return total


@dataclass(frozen=True, slots=True)
class CheckpointRows:
    """What subset sums take from one checkpoint.

    Attributes:
        loss_weights: Q of the training samples, shape (n,).
        normal_weights: Diagonal of W, shape (n,), by power of the loss weights.
        read: Rows of Phi_c from start to stop, shape (rows, k).
        target_features: T_c, shape (m, k), float64.
        block: Training samples to read at once.
    """

    loss_weights: np.ndarray
    normal_weights: Mapping[float, np.ndarray]
    read: ReadRows
    target_features: np.ndarray
    block: int

    def blocks(self) -> Blocks:
        """Yield all rows of Phi_c."""
        return read_blocks(self.read, len(self.loss_weights), self.block)


def average_weights(
    settings: Iterable[Setting], loss_weights: Sequence[np.ndarray]
) -> dict[float, np.ndarray]:
    """Return mean_c(Q_c^power) for every power that a setting has, all of shape (n,)."""
    powers = sorted({setting.loss_weight_power for setting in settings})
    return {p: np.mean([powered(q, p) for q in loss_weights], axis=0) for p in powers}


@dataclass(frozen=True, slots=True)
class FeaturePass:
    """Settings that share how rows are read and weighed, so that each file is read once.

    Attributes:
        checkpoints: Ids of those that count.
        averages: From ``average_weights``, over these checkpoints.
        weighting: ``plain`` or ``curvature``.
        unit_dim: How many first numbers of a row are divided by their length; None for rows as they
            are.
    """

    settings: Sequence[Setting]
    checkpoints: Sequence[str]
    averages: Mapping[float, np.ndarray]
    weighting: str
    unit_dim: int | None


def setting_sums(
    masks: np.ndarray,
    settings: Sequence[Setting],
    averages: Mapping[float, np.ndarray],
    checkpoint: CheckpointRows,
) -> dict[Setting, np.ndarray]:
    """Return one checkpoint's share of the subset sums under each setting of scoring.

    Phi_c is read once. Sums over checkpoints of these shares, shape (S, m), order subsets as scores
    do, because they lack the division by the number of checkpoints alone. Masks are those of
    ``subset_sums``, and ``averages`` those of ``average_weights``, over all checkpoints.

    Source: docs/explanation/scores.md, "The formula".
    """
    q = checkpoint.loss_weights
    powers = sorted({setting.loss_weight_power for setting in settings})
    weightings = sorted({setting.loss_weighting for setting in settings})
    row_weights = [
        averages[power] if combine is Combine.PRODUCT_OF_AVERAGES else powered(q, power)
        for power, combine in weightings
    ]
    # Products of k x k cost most: rows with equal weights are summed once.
    squared = [np.ones(len(q))]
    normal = {power: _place(squared, checkpoint.normal_weights[power]) for power in powers}
    norm = {p: _place(squared, powered(q, p) ** 2) for p, c in weightings if c.divides_by_norm}
    sums, gramians = weighted_sums(masks, row_weights, checkpoint.blocks(), squared)
    shares: dict[Setting, np.ndarray] = {}
    for dim in sorted({setting.proj_dim for setting in settings}):
        first = [gramian[:dim, :dim] for gramian in gramians]
        for place in sorted(set(normal.values())):
            own = [s for s in settings if (s.proj_dim, normal[s.loss_weight_power]) == (dim, place)]
            spectrum = Spectrum.decompose(first[place])
            mean_square = mean_squared_norm(first[place], len(q))
            ridges = {s.damping: s.damping * mean_square for s in own}
            used = sorted({weightings.index(s.loss_weighting) for s in own})
            targets = checkpoint.target_features[:, :dim]
            solved = damped_sums(sums[used, :, :dim], spectrum, list(ridges.values()), targets)
            products = {
                power: spectrum.norm_products(first[norm[power]], first[0])
                for power in {s.loss_weight_power for s in own} & norm.keys()
            }
            for setting in own:
                row = used.index(weightings.index(setting.loss_weighting))
                share = solved[list(ridges).index(setting.damping), row]
                if setting.combine.divides_by_norm:
                    product, ridge = products[setting.loss_weight_power], ridges[setting.damping]
                    share = share / train_norm(spectrum.eigenvalues, product, ridge)
                shares[setting] = share
    return shares


def _place(arrays: list[np.ndarray], array: np.ndarray) -> int:
    """Return where an array is among others, after adding it if it isn't."""
    for place, other in enumerate(arrays):
        if np.array_equal(other, array):
            return place
    arrays.append(array)
    return len(arrays) - 1


def weighted_sums(
    masks: np.ndarray,
    weights: Sequence[np.ndarray],
    blocks: Blocks,
    squared: Sequence[np.ndarray] = (),
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return weighted sums of each subset's features, and weighted products of all, in one pass.

    Masks are those of ``subset_sums``, features of shape (rows, k). Weights of the training samples
    and of the products (``squared``) have shape (n,) each. Sums have shape (len(weights), S, k);
    ``weighted_gramians`` makes the products.
    """
    totals: list[np.ndarray] = []

    def summed() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        for start, stop, features in blocks:
            rows = features.astype(np.float64)
            part = np.stack([(masks[:, start:stop] * w[start:stop]) @ rows for w in weights])
            totals[:] = [np.add(totals[0], part, out=part) if totals else part]
            yield rows, [w[start:stop] for w in squared]

    gramians = weighted_gramians(summed())
    return totals[0], gramians


def damped_sums(
    sums: np.ndarray, spectrum: Spectrum, ridges: Sequence[float], targets: np.ndarray
) -> np.ndarray:
    """Return sums of A_c's columns over subsets for every ridge, by one eigendecomposition.

    With N = V D V^T they are (sums V) (D + ridge I)^-1 (T V)^T. Sums are those of
    ``weighted_sums``, shape (W, S, k), or their first k columns, and the spectrum is that of N's
    first k rows and columns. Ridges are above 0; targets T have shape (m, k), float64. The result
    has shape (len(ridges), W, S, m).

    Source: docs/explanation/scores.md, "The formula".
    """
    rotated, rotated_targets = sums @ spectrum.vectors, targets @ spectrum.vectors
    return np.stack([
        (rotated / (spectrum.eigenvalues + ridge)) @ rotated_targets.T for ridge in ridges
    ])

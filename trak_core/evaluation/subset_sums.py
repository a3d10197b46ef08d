"""Sum scores over subsets of training samples, for many scoring settings in one pass.

A subset sum adds up a target's scores over the training samples of a subset. It is linear in the
rows of Phi_c: with masks M (S, n), weights w (n,) and solved targets X_c (k, m), the sums are
((M * w) Phi_c) X_c. The first factor is computed once for all values of the damping, and the n x m
scores are never formed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.attribution.fitted_checkpoint import ReadRows
from trak_core.attribution.score_formulas import powered
from trak_core.attribution.solve import Spectrum, mean_squared_norm, train_norm, weighted_gramians
from trak_core.settings import Combine, Setting

# A row of the summary: method, kind, proj_dim (0 without a projection).
Key = tuple[str, str, int]


def _blocks(n_rows: int, block: int) -> Iterator[slice]:
    return (slice(start, min(start + block, n_rows)) for start in range(0, n_rows, block))


def subset_sums(masks: np.ndarray, read: ReadRows, block: int) -> np.ndarray:
    """Return ``masks @ rows``, the sum of each subset's rows, shape (S, m), float64.

    Masks are 1 if a subset contains a training sample, else 0, shape (S, n), float64. ``read``
    returns the rows of the training samples from start to stop, ``block`` rows at a time.
    """
    total = np.zeros(())
    for own in _blocks(masks.shape[1], block):
        total = total + masks[:, own] @ read(own.start, own.stop)
    return total


@dataclass(frozen=True, slots=True)
class CheckpointRows:
    """The features and weights of one checkpoint.

    Attributes:
        loss_weights: Q of the training samples, shape (n,).
        normal_weights: The diagonal of W, shape (n,), for each power of the loss weights.
        read: A function that returns rows of Phi_c from start to stop, shape (rows, k).
        target_features: T_c, shape (m, k), float64.
        block: The number of training samples in a block.
        normal_matrix: N, shape (k, k). None for Phi_c^T W Phi_c.
    """

    loss_weights: np.ndarray
    normal_weights: Mapping[float, np.ndarray]
    read: ReadRows
    target_features: np.ndarray
    block: int
    normal_matrix: np.ndarray | None = None


def average_weights(
    settings: Iterable[Setting], loss_weights: Sequence[np.ndarray]
) -> dict[float, np.ndarray]:
    """Return mean_c(Q_c^power), shape (n,), for each power in the settings."""
    powers = sorted({setting.loss_weight_power for setting in settings})
    return {p: np.mean([powered(q, p) for q in loss_weights], axis=0) for p in powers}


@dataclass(frozen=True, slots=True)
class FeaturePass:
    """Settings for which a checkpoint's features are read once, and the checkpoints to sum over.

    All settings have the same ``weighting``. If ``unit_dim`` is a number, rows of features are cut
    to this number of columns and divided by their length.
    """

    settings: Sequence[Setting]
    checkpoints: Sequence[str]
    weighting: str
    unit_dim: int | None


def setting_sums(
    masks: np.ndarray,
    settings: Sequence[Setting],
    averages: Mapping[float, np.ndarray],
    checkpoint: CheckpointRows,
) -> dict[Setting, np.ndarray]:
    """Return one checkpoint's term of the subset sums for each setting, shape (S, m).

    Phi_c is read once. The sum of these terms over checkpoints is the subset sum of scores times
    the number of checkpoints, which does not change ranks. See ``subset_sums`` for masks.
    ``averages`` is the result of ``average_weights`` for all checkpoints.

    Source: docs/explanation/scores.md, "The formula".
    """
    q = checkpoint.loss_weights
    powers = sorted({setting.loss_weight_power for setting in settings})
    weightings = sorted({setting.loss_weighting for setting in settings})
    row_weights = [
        averages[power] if combine is Combine.PRODUCT_OF_AVERAGES else powered(q, power)
        for power, combine in weightings
    ]
    # The k x k products take most of the time, so those with equal weights are computed once.
    # `normal` and `norm` contain indices into `squared`.
    squared = [np.ones(len(q))]
    normal = {power: _index(squared, checkpoint.normal_weights[power]) for power in powers}
    norm = {p: _index(squared, powered(q, p) ** 2) for p, c in weightings if c.divides_by_norm}
    sums, gramians = weighted_sums(masks, row_weights, checkpoint.read, checkpoint.block, squared)
    terms: dict[Setting, np.ndarray] = {}
    for dim in sorted({setting.proj_dim for setting in settings}):
        first = [gramian[:dim, :dim] for gramian in gramians]
        for index in sorted(set(normal.values())):
            own = [s for s in settings if (s.proj_dim, normal[s.loss_weight_power]) == (dim, index)]
            given = checkpoint.normal_matrix
            matrix = first[index] if given is None else given[:dim, :dim]
            spectrum = Spectrum.decompose(matrix)
            mean_square = mean_squared_norm(matrix, len(q))
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
                term = solved[list(ridges).index(setting.damping), row]
                if setting.combine.divides_by_norm:
                    product, ridge = products[setting.loss_weight_power], ridges[setting.damping]
                    term = term / train_norm(spectrum.eigenvalues, product, ridge)
                terms[setting] = term
    return terms


def _index(arrays: list[np.ndarray], array: np.ndarray) -> int:
    """Return the index of an equal array in a list. If there is none, the array is appended."""
    for index, other in enumerate(arrays):
        if np.array_equal(other, array):
            return index
    arrays.append(array)
    return len(arrays) - 1


def weighted_sums(
    masks: np.ndarray,
    weights: Sequence[np.ndarray],
    read: ReadRows,
    block: int,
    squared: Sequence[np.ndarray] = (),
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return weighted sums of each subset's features, and weighted products, in one pass.

    Sums have shape (len(weights), S, k). There is a product Phi^T diag(w) Phi, shape (k, k), for
    each w in ``squared``. All weights have shape (n,). See ``subset_sums`` for the other arguments.
    """
    sums = np.zeros(())

    def rows_and_weights() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        nonlocal sums
        for own in _blocks(masks.shape[1], block):
            rows = read(own.start, own.stop).astype(np.float64)
            part = np.stack([(masks[:, own] * w[own]) @ rows for w in weights])
            sums = np.add(sums, part, out=part)
            yield rows, [w[own] for w in squared]

    gramians = weighted_gramians(rows_and_weights())
    return sums, gramians


def damped_sums(
    sums: np.ndarray, spectrum: Spectrum, ridges: Sequence[float], targets: np.ndarray
) -> np.ndarray:
    """Return subset sums of the columns of A_c for each ridge, by one eigendecomposition.

    With N = V D V^T, the subset sums are (sums V) (D + ridge I)^-1 (T V)^T, of shape (len(ridges),
    W, S, m). ``sums`` is the result of ``weighted_sums``, shape (W, S, k). ``spectrum`` has the
    eigenvectors V (k, k) and eigenvalues D of N. Targets T have shape (m, k), float64. Ridges are
    positive.

    Source: docs/explanation/scores.md, "The formula".
    """
    rotated, rotated_targets = sums @ spectrum.vectors, targets @ spectrum.vectors
    return np.stack([
        (rotated / (spectrum.eigenvalues + ridge)) @ rotated_targets.T for ridge in ridges
    ])

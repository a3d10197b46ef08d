"""Sum scores over subsets of training samples, for many scoring settings in one pass.

The scores of n training samples for m targets at a checkpoint are diag(w) Phi X, with loss weights
w (n,), training features Phi (n, k), and X = (N + ridge I)^-1 T^T (k, m) for the normal matrix N
and the features T (m, k) of targets. For S subsets with masks M (S, n), the sums of these scores
are ((M * w) Phi) X. The factor (M * w) Phi does not depend on the damping, so it is computed once
for all values of the damping, and the n x m scores are never formed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trak_core.attribution.fitted_checkpoint import ReadRows
from trak_core.attribution.score_formulas import powered
from trak_core.attribution.solve import Spectrum, mean_squared_norm, train_norm, weighted_gramians
from trak_core.settings import Combine, Setting

# The method, projection kind and dimension (0 without a projection) in the tables of an evaluation.
Key = tuple[str, str, int]


def _blocks(n_rows: int, block: int) -> Iterator[slice]:
    return (slice(start, min(start + block, n_rows)) for start in range(0, n_rows, block))


def subset_sums(masks: np.ndarray, read: ReadRows, block: int) -> np.ndarray:
    """Return the sums of a matrix's rows over S subsets of its rows, shape (S, m), float64.

    The matrix has a row for each of n training samples. ``masks`` are 1 where a subset contains a
    training sample, else 0, shape (S, n), float64. ``read(start, stop)`` returns rows of the
    matrix, shape (stop - start, m). Each call reads ``block`` rows, so that the matrix need not fit
    into memory.
    """
    total = np.zeros(())
    for own in _blocks(masks.shape[1], block):
        total = total + masks[:, own] @ read(own.start, own.stop)
    return total


@dataclass(frozen=True, slots=True)
class CheckpointRows:
    """The features and weights of one checkpoint, for n training samples and m targets.

    Attributes:
        loss_weights: The loss weights of the training samples, shape (n,).
        normal_weights: For each power of the loss weights in the settings, the weights of training
            samples in the normal matrix, shape (n,).
        read: A function (start, stop) that returns training features, shape (stop - start, k).
        target_features: The features of the targets, shape (m, k), float64.
        block: The number of training samples to read at a time.
        normal_matrix: The normal matrix, shape (k, k), or None to compute it from the training
            features and ``normal_weights``.
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
    """Return loss weights to the power p, averaged over checkpoints, for each p in ``settings``."""
    powers = sorted({setting.loss_weight_power for setting in settings})
    return {p: np.mean([powered(q, p) for q in loss_weights], axis=0) for p in powers}


@dataclass(frozen=True, slots=True)
class FeaturePass:
    """Scoring settings whose subset sums are computed together from features that are read once.

    All settings use the same ``checkpoints`` and the same ``weighting`` of the normal matrix. If
    ``unit_dim`` is not None, only the first ``unit_dim`` numbers of each feature vector are used,
    and the shortened vector is divided by its length.
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
    """Return the contribution of one checkpoint to the subset sums of each setting, shape (S, m).

    The sum of the contributions of all checkpoints equals the subset sums of the scores, multiplied
    by the number of checkpoints. This factor does not change the ranks of subsets. ``masks`` is
    described in ``subset_sums``, and ``averages`` is the result of ``average_weights`` for all
    checkpoints.

    Source: docs/explanation/scores.md, "The formula".
    """
    q = checkpoint.loss_weights
    powers = sorted({setting.loss_weight_power for setting in settings})
    weightings = sorted({setting.loss_weighting for setting in settings})
    row_weights = [
        averages[power] if combine is Combine.PRODUCT_OF_AVERAGES else powered(q, power)
        for power, combine in weightings
    ]
    # The k x k products of features take most of the time, so they are computed only once for equal
    # weights. `squared` contains the different weights, and `normal` and `norm` index into it.
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
    """Return the index of an array in a list. Append the array first if it is not in the list."""
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
    """Return weighted sums of training features, and weighted normal matrices, in one pass.

    For the features Phi (n, k), the sums are (masks * w) Phi for each w in ``weights``, shape
    (len(weights), S, k). The matrices are Phi^T diag(w) Phi for each w in ``squared``, each of
    shape (k, k). All w have shape (n,). ``subset_sums`` describes the other arguments.
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
    """Return subset sums of scores for each ridge, from one eigendecomposition.

    With the decomposition V D V^T of the normal matrix (``spectrum``) and the target features T
    (``targets``, shape (m, k)), the subset sums are (sums V) (D + ridge I)^-1 (T V)^T. They have
    shape (len(ridges), W, S, m) for ``sums`` of shape (W, S, k) from ``weighted_sums``. Ridges are
    above 0.

    Source: docs/explanation/scores.md, "The formula".
    """
    rotated, rotated_targets = sums @ spectrum.vectors, targets @ spectrum.vectors
    return np.stack([
        (rotated / (spectrum.eigenvalues + ridge)) @ rotated_targets.T for ridge in ridges
    ])

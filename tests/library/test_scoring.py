"""Scores and normal matrices from features, block by block, against dense NumPy in float64.

Sums of scores over subsets, from features, equal sums of a matrix of scores.
"""

import re

import numpy as np
import pytest
from refused import refused

from trak_core.attribution.score_formulas import combined, largest, most_frequent, unit_rows
from trak_core.attribution.solve import (
    DampedGramian,
    DampedMatrix,
    Spectrum,
    inverse_lengths,
    mean_squared_norm,
    train_norm,
    weighted_gramians,
)
from trak_core.evaluation.subset_sums import CheckpointRows, average_weights, setting_sums
from trak_core.settings import Combine, Setting

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_of_length_1(dtype):
    """3, 4, 5 is exact. A row of zeros stays zero."""
    rows = np.array([[3, 4], [0, 0], [0, -7]], dtype)
    kept = rows.copy()
    unit = unit_rows(rows)
    assert unit.dtype == np.float64
    np.testing.assert_array_equal(unit, [[0.6, 0.8], [0, 0], [0, -1]])
    np.testing.assert_array_equal(rows, kept)


@pytest.mark.parametrize("left", [1e-16, -1e-16, 0])
def test_a_gramian_of_gradients_of_length_1(left):
    """Inner products of a gradient of 0 may be rounding errors of either sign."""
    gradients, targets = RNG.standard_normal((6, 4)), RNG.standard_normal((3, 4))
    gradients[2] = 0
    k, k_t = gradients @ gradients.T, gradients @ targets.T
    k[2, 2], k[2, 3], k[3, 2], k_t[2, 1] = left, 1e-16, 1e-16, -1e-16
    inverse = inverse_lengths(k)
    k, k_t = k * inverse * inverse.T, k_t * inverse
    unit = unit_rows(gradients)
    np.testing.assert_allclose(k, unit @ unit.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(k_t, unit @ targets.T, rtol=1e-12, atol=1e-12)
    assert not k[2].any()


def test_the_ways_to_combine():
    """Also that no block is changed, and that sums of float32 are float64."""
    blocks = [RNG.standard_normal((4, 2)).astype(np.float32) for _ in range(3)]
    weights = [RNG.random(4) for _ in range(3)]
    norms = [0.5, 3.0, 1e6]
    a, q = np.array(blocks, dtype=np.float64), np.array(weights)
    products = a * q[:, :, None]
    for combine, expected in {
        Combine.PRODUCT_OF_AVERAGES: a.mean(0) * q.mean(0)[:, None],
        Combine.AVERAGE_OF_PRODUCTS: products.mean(0),
        Combine.UNIT_AVERAGE: (products / np.array(norms)[:, None, None]).mean(0),
    }.items():
        scores = combined(zip(blocks, weights, norms, strict=True), combine)
        assert scores.dtype == np.float64
        np.testing.assert_allclose(scores, expected)
        np.testing.assert_array_equal(blocks, a)


@pytest.mark.parametrize("n_checkpoints", [1, 2, 7, 300])
def test_the_most_frequent_class(n_checkpoints):
    """A tie goes to the label if its mean log-odds are above 0, else to the smallest other."""
    classes = RNG.integers(-1, 4, (n_checkpoints, 200))
    labels, outputs = RNG.integers(-1, 4, 200), RNG.standard_normal((n_checkpoints, 200))

    def of_row(own, label, likely):
        most = max(map(own.count, own))
        tied = sorted({k for k in own if own.count(k) == most})
        if label in tied and (likely or tied == [label]):
            return label
        return min(k for k in tied if k != label)

    likely = outputs.mean(axis=0) > 0
    expected = [of_row(*row) for row in zip(classes.T.tolist(), labels, likely, strict=True)]
    mine = most_frequent(classes, labels, outputs)
    np.testing.assert_array_equal(mine, expected)
    assert mine.dtype == classes.dtype


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 22]])
@pytest.mark.parametrize("keep", [1, 5, 100])
def test_largest_entries_whatever_the_blocks(cuts, keep):
    scores = RNG.integers(-2, 4, (23, 6)).astype(np.float32)  # with ties
    scores[:, :2] = np.sort(scores[:, :2], axis=0)  # rising, and falling
    scores[:, 1] *= -1
    scores[:, 2] = 0
    seen, start = None, 0
    for block in np.split(scores, cuts):
        seen = largest(seen, start, block, keep)
        start += len(block)
    order = np.argsort(-scores, axis=0, kind="stable")[:keep]
    np.testing.assert_array_equal(seen.rows, order)
    np.testing.assert_array_equal(seen.scores, np.take_along_axis(scores, order, axis=0))


def rows(n=40, k=7, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("cuts", [[], [1], [13, 14, 39]])
def test_weighted_gramians_are_sums_of_outer_products(cuts):
    phi, weights = rows(), (np.linspace(0, 2, 40), np.ones(40), np.linspace(3, 0, 40) ** 2)
    split = zip(*(np.split(w, cuts) for w in weights), strict=True)
    matrices = weighted_gramians(zip(np.split(phi, cuts), split, strict=True))
    double = phi.astype(np.float64)
    for matrix, w in zip(matrices, weights, strict=True):
        np.testing.assert_allclose(matrix, double.T @ np.diag(w) @ double, rtol=1e-12)
        np.testing.assert_array_equal(matrix, matrix.T)
        squared = np.mean(w * (double**2).sum(1))
        np.testing.assert_allclose(mean_squared_norm(matrix, 40), squared)


def test_sums_are_float64():
    """In float32 the second row would be lost by rounding."""
    phi = np.array([[1e4], [1.0]], np.float32)
    assert weighted_gramians(iter([(phi, [np.ones(2)])]))[0] == 1e8 + 1


# Whatever the order of magnitude of features and loss weights.
@pytest.mark.parametrize("scale", [1, 1e-12, 1e12])
@pytest.mark.parametrize(("power", "k"), [(1, 7), (0.75, 7), (0.75, 39), (1, 40), (0.75, 64)])
def test_the_train_norm_is_that_of_the_dense_matrix(power, k, scale):
    """Also if the normal matrix has more rows than there are training samples."""
    phi, rng = scale * rows(k=k).astype(np.float64), np.random.default_rng(3)
    q, w = rng.standard_normal(40), rng.random(40)
    weighted = np.abs(q) ** (2 * power)
    normal, weighted, plain = weighted_gramians([(phi, [w, weighted, np.ones(40)])])
    spectrum = Spectrum.decompose(normal)
    products = spectrum.norm_products(weighted, plain)
    for damping in (0.1, 2):
        ridge = damping * mean_squared_norm(normal, 40)
        scores = np.abs(q)[:, None] ** power * (
            phi @ np.linalg.solve(phi.T @ (w[:, None] * phi) + ridge * np.eye(k), phi.T)
        )
        norm = train_norm(spectrum.eigenvalues, products, ridge)
        np.testing.assert_allclose(norm, np.linalg.norm(scores), rtol=1e-10)


def test_a_norm_of_zero_is_refused():
    with refused("scoring.norm", "Found 0"):
        train_norm(np.ones(3), np.zeros((3, 3)), 1.0)


@pytest.mark.parametrize("ridge", [0.0, 3.0])
def test_a_known_solution(ridge):
    (matrix,) = weighted_gramians([(rows(), [np.ones(40)])])
    expected = np.random.default_rng(1).standard_normal((7, 3))
    right = (matrix + ridge * np.eye(7)) @ expected
    solved = DampedMatrix.factorize(matrix, ridge).solve(right)
    np.testing.assert_allclose(solved, expected, rtol=1e-10)


# Rounding decides the condition number of a singular matrix.
CONDITION = re.compile(r"Found \S+ \(eigenvalues \S+ to \S+,"), re.compile(r"ridge = \S+,")


def test_singular_matrices_are_refused():
    (matrix,) = weighted_gramians([(rows(n=5), [np.ones(5)])])
    for ridge in (0.0, 1e-9):
        with refused("scoring.singular", *CONDITION, "7 rows"):
            DampedMatrix.factorize(matrix, ridge)
    with refused("scoring.singular", "infinite", *CONDITION, "2 rows"):
        DampedMatrix.factorize(np.zeros((2, 2)), 0.0, (0.0, 0.0))
    ones, zero_first = np.ones(7), np.r_[0, np.ones(6)]
    for gramian, weights, damping in (
        (matrix, ones, 0),
        (matrix, ones, 1e-12),
        (np.eye(7), zero_first, 0),
    ):
        with refused("scoring.singular", *CONDITION, "7 rows", "scoring.damping"):
            DampedGramian.factorize(gramian, weights, damping)


N, K, M, S = 90, 24, 5, 11
PHI = RNG.standard_normal((N, K)).astype(np.float32)
TARGETS = RNG.standard_normal((M, K))
MASKS = (RNG.random((S, N)) < 0.5).astype(float)
WEIGHTS = RNG.random(N)


@pytest.mark.parametrize("dim", [K, 7])
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("combine", list(Combine))
def test_sums_of_settings_are_sums_of_scores(combine, is_given, dim):
    """The normal matrix is that of the features, or another one that is given."""
    q, power, curvature = WEIGHTS, 0.75, np.linspace(0.1, 1, N)
    rows = RNG.standard_normal((3 * K, K))
    settings = [
        Setting(damping=damping, loss_weight_power=power, combine=combine, proj_dim=dim)
        for damping in (0.1, 3)
    ]
    own = {power: curvature}, lambda start, stop: PHI[start:stop]
    checkpoint = CheckpointRows(q, *own, TARGETS, 13, rows.T @ rows if is_given else None)
    sums = setting_sums(MASKS, settings, average_weights(settings, [q]), checkpoint)
    phi = PHI[:, :dim].astype(float)
    normal = (rows.T @ rows)[:dim, :dim] if is_given else phi.T @ (curvature[:, None] * phi)
    for setting in settings:
        ridge = setting.damping * np.trace(normal) / N
        inverse = np.linalg.inv(normal + ridge * np.eye(dim))
        scores = q[:, None] ** power * (phi @ inverse @ TARGETS[:, :dim].T)
        if combine is Combine.UNIT_AVERAGE:
            scores /= np.linalg.norm(q[:, None] ** power * (phi @ inverse @ phi.T))
        np.testing.assert_allclose(sums[setting], MASKS @ scores, rtol=1e-8)


def test_squares_are_the_diagonal_of_the_scores():
    (matrix,) = weighted_gramians([(PHI, [np.ones(N)])])
    ridge = mean_squared_norm(matrix, N)
    squares = DampedMatrix.factorize(matrix, ridge).squares(PHI)
    expected = np.diagonal(PHI @ np.linalg.inv(matrix + ridge * np.eye(K)) @ PHI.T)
    assert np.abs(squares - expected).max() < 1e-6 * expected.max()

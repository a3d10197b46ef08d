import re

import numpy as np
import pytest
from refused import refused

from trak_core.attribution.solve import (
    DampedGramian,
    Spectrum,
    damped_solve,
    extreme_eigenvalues,
    mean_squared_norm,
    train_norm,
    weighted_gramians,
)


def rows(n=40, k=7, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("cuts", [[], [1], [13, 14, 39]])
def test_weighted_gramians_are_sums_of_outer_products(cuts):
    phi, ways = rows(), (np.linspace(0, 2, 40), np.ones(40), np.linspace(3, 0, 40) ** 2)
    split = zip(*(np.split(w, cuts) for w in ways), strict=True)
    found = weighted_gramians(zip(np.split(phi, cuts), split, strict=True))
    double = phi.astype(np.float64)
    for matrix, w in zip(found, ways, strict=True):
        np.testing.assert_allclose(matrix, double.T @ np.diag(w) @ double, rtol=1e-12)
        np.testing.assert_array_equal(matrix, matrix.T)
        squared = np.mean(w * (double**2).sum(1))
        np.testing.assert_allclose(mean_squared_norm(matrix, 40), squared)


# Whatever the order of magnitude of features and loss weights.
@pytest.mark.parametrize("scale", [1, 1e-12, 1e12])
@pytest.mark.parametrize("power", [1, 0.75])
def test_the_train_norm_is_that_of_the_matrix_written_out(power, scale):
    phi, rng = scale * rows().astype(np.float64), np.random.default_rng(3)
    q, w = rng.standard_normal(40), rng.random(40)
    weighted = np.abs(q) ** (2 * power)
    normal, weighted, plain = weighted_gramians([(phi, [w, weighted, np.ones(40)])])
    spectrum = Spectrum.decompose(normal)
    products = spectrum.norm_products(weighted, plain)
    for damping in (0.1, 2):
        shift = damping * mean_squared_norm(normal, 40)
        scores = np.abs(q)[:, None] ** power * (
            phi @ np.linalg.solve(phi.T @ (w[:, None] * phi) + shift * np.eye(7), phi.T)
        )
        found = train_norm(spectrum.eigenvalues, products, shift)
        np.testing.assert_allclose(found, np.linalg.norm(scores), rtol=1e-10)


def test_sums_are_float64():
    """In float32 the second row would vanish beside the first."""
    phi = np.array([[1e4], [1.0]], np.float32)
    assert weighted_gramians(iter([(phi, [np.ones(2)])]))[0] == 1e8 + 1


def test_no_rows_and_a_norm_of_zero_are_refused():
    """What every training sample fits exactly says nothing, and can't be divided by."""
    with refused("scoring.no_rows"):
        weighted_gramians(iter([]))
    with refused("scoring.norm", "Found 0"):
        train_norm(np.ones(3), np.zeros((3, 3)), 1.0)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_solution_by_construction(shift):
    (matrix,) = weighted_gramians([(rows(), [np.ones(40)])])
    expected = np.random.default_rng(1).standard_normal((7, 3))
    right = (matrix + shift * np.eye(7)) @ expected
    found = damped_solve(matrix, shift, extreme_eigenvalues(matrix), right)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


# Rounding decides how a condition number of noise comes out.
CONDITION = re.compile(r"Found \S+ \(eigenvalues \S+ to \S+,"), re.compile(r"ridge = \S+,")


@pytest.mark.parametrize("shift", [0.0, 1e-9])
def test_singular_matrices_are_refused_in_words(shift):
    (matrix,) = weighted_gramians([(rows(n=5), [np.ones(5)])])
    with refused("scoring.singular", *CONDITION, "k = 7"):
        damped_solve(matrix, shift, extreme_eigenvalues(matrix), np.ones((7, 1)))


def test_features_of_zeros_and_a_singular_gramian_are_refused():
    with refused("scoring.singular", "infinite", *CONDITION, "k = 2"):
        damped_solve(np.zeros((2, 2)), 0.0, (0.0, 0.0), np.ones((2, 1)))
    with refused("scoring.singular_gramian", *CONDITION, "n = 2"):
        DampedGramian.factorize(np.ones((2, 2)), np.ones(2), 0)

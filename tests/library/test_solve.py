"""The damped solver and the normal matrices, against dense linear algebra in float64."""

import re

import numpy as np
import pytest
from refused import refused

from trak_core.attribution.solve import (
    DampedGramian,
    DampedMatrix,
    Spectrum,
    mean_squared_norm,
    train_norm,
    weighted_gramians,
)


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
@pytest.mark.parametrize("power", [1, 0.75])
def test_the_train_norm_is_that_of_the_dense_matrix(power, scale):
    phi, rng = scale * rows().astype(np.float64), np.random.default_rng(3)
    q, w = rng.standard_normal(40), rng.random(40)
    weighted = np.abs(q) ** (2 * power)
    normal, weighted, plain = weighted_gramians([(phi, [w, weighted, np.ones(40)])])
    spectrum = Spectrum.decompose(normal)
    products = spectrum.norm_products(weighted, plain)
    for damping in (0.1, 2):
        ridge = damping * mean_squared_norm(normal, 40)
        scores = np.abs(q)[:, None] ** power * (
            phi @ np.linalg.solve(phi.T @ (w[:, None] * phi) + ridge * np.eye(7), phi.T)
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
    with refused("scoring.singular", *CONDITION, "2 rows"):
        DampedGramian.factorize(np.ones((2, 2)), np.ones(2), 0)

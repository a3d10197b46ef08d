import numpy as np
import pytest

from trak_core.errors import InputError
from trak_core.scoring.solve import damped_solve, extreme_eigenvalues, normal_matrix


def rows(n=40, k=7, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("cuts", [[], [1], [13, 14, 39]])
def test_normal_matrix_is_the_weighted_sum_of_outer_products(cuts):
    phi, w = rows(), np.linspace(0, 2, 40)
    parts = list(zip(np.split(phi, cuts), np.split(w, cuts), strict=True))
    matrix, mean_squared_norm, n = normal_matrix(iter(parts))
    double = phi.astype(np.float64)
    np.testing.assert_allclose(matrix, double.T @ np.diag(w) @ double, rtol=1e-13)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(mean_squared_norm, np.mean(w * (double**2).sum(1)))
    assert n == 40


def test_sums_are_float64():
    """In float32 the second row would vanish beside the first."""
    phi = np.array([[1e4], [1.0]], np.float32)
    assert normal_matrix(iter([(phi, np.ones(2))]))[0] == 1e8 + 1


def test_no_rows():
    with pytest.raises(InputError, match="at least one"):
        normal_matrix(iter([]))


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_solution_by_construction(shift):
    matrix, _, _ = normal_matrix([(rows(), np.ones(40))])
    expected = np.random.default_rng(1).standard_normal((7, 3))
    right = (matrix + shift * np.eye(7)) @ expected
    found = damped_solve(matrix, shift, extreme_eigenvalues(matrix), right)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("shift", [0.0, 1e-9])
def test_singular_matrices_are_refused_in_words(shift):
    matrix, _, _ = normal_matrix([(rows(n=5), np.ones(5))])
    with pytest.raises(InputError, match=r"condition number .* Raise `scoring\.damping`"):
        damped_solve(matrix, shift, extreme_eigenvalues(matrix), np.ones((7, 1)))


def test_all_zero_features_are_refused():
    with pytest.raises(InputError, match="infinite"):
        damped_solve(np.zeros((2, 2)), 0.0, (0.0, 0.0), np.ones((2, 1)))

"""Scores of checkpoints from along runs: the formula by dense matrices."""

import numpy as np
import pytest

from trak_core.attribution.score_formulas import combined, powered
from trak_core.attribution.solve import (
    DampedGramian,
    DampedMatrix,
    Spectrum,
    mean_squared_norm,
    train_norm,
    weighted_gramians,
)
from trak_core.settings import Combine

N, M, K, POWER, DAMPING = 37, 5, 12, 0.75, 2


def checkpoint(seed, residuals=False):
    """Features, targets' features, Q and the diagonal of W of one checkpoint."""
    rng = np.random.default_rng(seed)
    phi, targets = rng.standard_normal((N, K)) * 10.0 ** rng.integers(-3, 4), rng.random((M, K))
    q = rng.standard_normal(N) if residuals else rng.random(N)
    return phi, targets, q, np.ones(N) if residuals else (q * (1 - q)) ** POWER


def parts(checkpoints):
    for phi, targets, q, w in checkpoints:
        weighted = powered(q, POWER) ** 2
        normal, weighted, plain = weighted_gramians([(phi, [w, weighted, np.ones(N)])])
        spectrum, ridge = Spectrum.decompose(normal), DAMPING * mean_squared_norm(normal, N)
        solved = DampedMatrix.factorize(normal, ridge).solve(targets.T)
        norm = train_norm(spectrum.eigenvalues, spectrum.norm_products(weighted, plain), ridge)
        yield phi @ solved, powered(q, POWER), norm


def scores(checkpoints):
    return combined(parts(checkpoints), Combine.UNIT_AVERAGE)


def exact_parts(checkpoints):
    for phi, targets, q, w in checkpoints:
        damped = DampedGramian.factorize(phi @ phi.T, w, DAMPING)
        weights = powered(q, POWER)
        yield damped.similarities(phi @ targets.T), weights, damped.train_norm(weights)


def written_out(checkpoints):
    """The formula of the spec, by dense matrices and sums over pairs."""
    total = np.zeros((N, M))
    for phi, targets, q, w in checkpoints:
        ridge = DAMPING * np.mean([w[i] * (phi[i] @ phi[i]) for i in range(N)])
        inverse = np.linalg.inv(phi.T @ np.diag(w) @ phi + ridge * np.eye(K))
        signed = np.sign(q) * np.abs(q) ** POWER
        squares = [
            (signed[i] * (phi[i] @ inverse @ phi[j])) ** 2 for i in range(N) for j in range(N)
        ]
        total += signed[:, None] * (phi @ inverse @ targets.T) / np.sqrt(np.sum(squares))
    return total / len(checkpoints)


@pytest.mark.parametrize("residuals", [False, True])
def test_the_formula(residuals):
    checkpoints = [checkpoint(seed, residuals) for seed in range(4)]
    expected = written_out(checkpoints)
    np.testing.assert_allclose(scores(checkpoints), expected, rtol=1e-9, atol=1e-14)
    exact = combined(exact_parts(checkpoints), Combine.UNIT_AVERAGE)
    np.testing.assert_allclose(exact, expected, rtol=1e-9, atol=1e-14)

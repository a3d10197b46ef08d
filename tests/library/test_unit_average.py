"""Scores of checkpoints from along runs: the formula by dense matrices."""

import h5py
import numpy as np
import pytest
import torch

from trak_core import Attributor
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


@pytest.mark.parametrize("weighting", ["plain", "curvature"])
@pytest.mark.parametrize("k", [8, 19, 20, 64])
def test_the_stored_spectrum_gives_the_norm_for_any_damping(tmp_path, k, weighting):
    """Also if the normal matrix has more rows than there are training samples."""
    torch.manual_seed(0)
    train = torch.randn(20, 6), torch.arange(20) % 3
    model = torch.nn.Linear(6, 3)
    given = {"a": {"path": model.state_dict(), "run": "run", "at": 1}}
    attributor = Attributor(
        model,
        "image_classification",
        given,
        proj_dim=k,
        weighting=weighting,
        combine="unit_average",
    )
    attributor.fit(train, tmp_path)
    power = attributor.settings.loss_weight_power
    with h5py.File(tmp_path / "features/a/train.h5") as file:
        phi, q = (file[key][:].astype(float) for key in ("features/block0_values", "loss_weights"))
        w = file["curvature"][:] ** power if weighting == "curvature" else np.ones(20)
    normal = phi.T @ np.diag(w) @ phi
    with h5py.File(tmp_path / "normal_matrix/a.h5") as file:
        assert np.allclose(file["normal_matrix/block0_values"], normal)
        eigenvalues, products = file["eigenvalues"][:], file["norm_products/block0_values"][:]
        ends = [file[f"{name}_eigenvalue"][()] for name in ("smallest", "largest")]
    expected = np.linalg.eigvalsh(normal)
    assert np.allclose(ends, expected[[0, -1]], atol=1e-6 * expected[-1])
    for ridge in (0.1 * expected[-1], expected[-1]):
        b = powered(np.abs(q), power)[:, None] * (
            phi @ np.linalg.inv(normal + ridge * np.eye(k)) @ phi.T
        )
        assert np.isclose(train_norm(eigenvalues, products, ridge), np.linalg.norm(b))

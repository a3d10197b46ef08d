"""A singular G^T G with lambda_reg = 0: the pseudo-inverse, and a warning."""

import re

import numpy as np
import pytest
import torch
from compat_models import M, N, Net, checkpoints, close, featurized, images, walk

from trak_core.compat.projectors import NoOpProjector
from trak_core.compat.score_computers import BasicScoreComputer, BasicSingleBlockScoreComputer

TRAIN, TARGETS, STATES = images(N), images(M, seed=1), checkpoints(Net, 2)
NO_INVERSE = r"has no inverse: its rank is {}, with proj_dim {}, {} training samples and lambda_"


def singular(rank, proj_dim, n=N):
    return pytest.warns(UserWarning, match=NO_INVERSE.format(rank, proj_dim, n))


def integers(seed, *shape):
    """Sums of products of small integers are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float64)


def scores_of(computer, g, t):
    """Scores of 0.3.2's formula by a score computer, shape (n, m)."""
    g, t = torch.tensor(g, dtype=torch.float32), torch.tensor(t, dtype=torch.float32)
    total = torch.zeros(len(g), len(t))
    features = computer.get_x_xtx_inv(g, computer.get_xtx(g))
    assert features.dtype == torch.float32
    computer.get_scores(features, t, accumulator=total)
    return total.double().numpy()


def oracle(g, t):
    """G K T^T with K = pinv(G^T G) / mean |pinv(G^T G)|, by singular values of G alone."""
    pinv = np.linalg.pinv(g, rcond=1e-6)
    return pinv.T @ t.T / np.abs(pinv @ pinv.T).mean()


CASES = {
    "fewer samples than dimensions": integers(0, 9, 30),
    "one sample": integers(1, 1, 8),
    "the same sample again": np.repeat(integers(2, 5, 12), 6, axis=0),
    "a dimension that nothing has": integers(3, 40, 10) * (np.arange(10) != 4),
    "a product of low rank": integers(4, 50, 3) @ integers(5, 3, 20),
}


@pytest.mark.parametrize("computer", [BasicScoreComputer, BasicSingleBlockScoreComputer])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_pseudo_inverse(case, computer):
    g = CASES[case]
    t = integers(6, 7, g.shape[1])
    with singular(np.linalg.matrix_rank(g), g.shape[1], len(g)):
        scores = scores_of(computer(torch.float32, "cpu"), g, t)
    close(scores, oracle(g, t), 1e-6)


@pytest.mark.parametrize(("n", "lambda_reg"), [(60, 0.0), (60, 1e-2), (60, 1.0), (9, 0.5)])
def test_an_invertible_matrix_has_no_warning_and_its_inverse(n, lambda_reg):
    """Warnings are errors in tests. The formula of 0.3.2 with NumPy's inverse is the oracle."""
    g, t = integers(7, n, 20), integers(8, 5, 20)
    inverse = np.linalg.inv(g.T @ g + lambda_reg * np.eye(20))
    expected = g @ (inverse / np.abs(inverse).mean()) @ t.T
    computer = BasicScoreComputer(torch.float32, "cpu", lambda_reg=lambda_reg)
    close(scores_of(computer, g, t), expected, 1e-4)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e15])
def test_finite_features_of_any_size_give_finite_scores(size):
    g, t = size * CASES["fewer samples than dimensions"], integers(6, 7, 30)
    with singular(9 if size else 0, 30, 9):
        scores = scores_of(BasicScoreComputer(torch.float32, "cpu"), g, t)
    assert np.isfinite(scores).all()
    assert scores.any() == (size > 0)


@pytest.mark.parametrize("half", [False, True])
def test_more_dimensions_than_parameters(half, tmp_path):
    """The rank is the number of parameters, even if float16 rounding raises that of the rows.

    Then G pinv(G^T G) T^T does not depend on the projection.
    """
    study = Net(), STATES[:1], TRAIN, TARGETS
    given = {"grad_wrt": ["bn1.weight"], "use_half_precision": half}
    with singular(8, 24):
        _, scores = walk(*study, save_dir=tmp_path / "wide", proj_dim=24, **given)
    none = NoOpProjector(device="cpu")
    _, expected = walk(*study, save_dir=tmp_path / "none", projector=none, **given)
    close(scores / np.abs(scores).max(), expected / np.abs(expected).max(), 2e-2 if half else 1e-3)


def test_the_suggested_lambda_reg_ends_the_warning(tmp_path):
    given = {"proj_dim": N + 10, "use_half_precision": True}
    traker = featurized(tmp_path, **given)
    with pytest.warns(UserWarning, match="no inverse") as caught:
        traker.finalize_features()
    assert traker.saver.model_ids[0]["is_finalized"] == 1
    (warning,) = caught
    assert warning.filename == __file__
    grads = traker.saver.current_store["grads"].astype(np.float64)
    usual = float(re.search(r"for example (\S+) \(", str(warning.message))[1])
    assert abs(usual / (2 * (grads**2).sum(1).mean()) - 1) < 0.5
    # Already finalized: no computation, so no warning.
    traker.finalize_features()
    featurized(tmp_path, lambda_reg=usual, **given).finalize_features()

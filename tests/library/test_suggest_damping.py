"""The damping that the training itself suggests, beside least squares trained by gradient steps."""

import numpy as np
import pytest

from trak_core.scoring.solve import Spectrum
from trak_core.scoring.suggest_damping import (
    DAMPINGS,
    Foretold,
    foretold_changes,
    foretold_samples,
    suggest_damping,
)


def _samples(n: int, k: int, seed: int) -> np.ndarray:
    """Return features whose directions have sizes from 1 to 1/k."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, k)) / np.arange(1, k + 1)


def _foretold(phi: np.ndarray, q: np.ndarray) -> np.ndarray:
    normal = phi.T @ phi
    unit = float(np.trace(normal)) / len(phi)
    return foretold_changes(Spectrum.decompose(normal), phi.T @ q, phi, unit)


def _trained(phi: np.ndarray, labels: np.ndarray, steps: int) -> Foretold:
    """Train a linear model by gradient steps from 0, and return what its start foretells."""
    weights = np.zeros(phi.shape[1])
    for _ in range(steps):
        weights += 0.5 / len(phi) * phi.T @ (labels - phi @ weights)
    lengths = np.linalg.norm(phi, axis=1)
    return Foretold(_foretold(phi, labels), lengths, phi @ weights)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (5, 9), (64, 17)])
def test_foretold_changes_are_sums_of_scores(n: int, k: int) -> None:
    """Each is the sum of a sample's scores over all training samples: K (K + ridge I)^-1 Q."""
    phi, q = _samples(n, k, 0), np.random.default_rng(1).standard_normal(n)
    kernel = phi @ phi.T
    changes = _foretold(phi, q)
    assert changes.shape == (n, len(DAMPINGS))
    for damping, own in zip(DAMPINGS, changes.T, strict=True):
        ridge = damping * np.trace(kernel) / n
        expected = kernel @ np.linalg.solve(kernel + ridge * np.eye(n), q)
        np.testing.assert_allclose(own, expected, rtol=1e-8, atol=1e-10)


def test_longer_trainings_suggest_smaller_dampings() -> None:
    """After few steps all directions moved by their size; after many, large ones are done."""
    phi = _samples(300, 20, 2)
    labels = phi @ np.random.default_rng(3).standard_normal(20)
    found = [suggest_damping([_trained(phi, labels, s)], 2.0) for s in (1, 30, 1000, 30000)]
    dampings = [own.damping for own in found if own]
    assert len(dampings) == 4
    assert dampings == sorted(dampings, reverse=True)
    assert dampings[0] > 2 > dampings[-1]
    assert found[0] is not None
    assert found[0].agreement > 0.99


def test_order_factors_and_offsets_do_not_count() -> None:
    """Neither that of runs nor that of samples, where draws of samples aren't concerned."""
    rng = np.random.default_rng(4)
    phi = _samples(200, 10, 5)
    runs = [_trained(phi, phi @ rng.standard_normal(10), steps) for steps in (20, 200)]
    order = rng.permutation(200)
    moved = [
        Foretold(7 * r.changes[order], r.lengths[order], 3 + 5 * r.happened[order])
        for r in runs[::-1]
    ]
    first, second = suggest_damping(runs, 1), suggest_damping(moved, 1)
    assert first is not None
    assert second is not None
    assert first.damping == second.damping
    np.testing.assert_allclose(
        [first.agreement, first.own], [second.agreement, second.own], rtol=1e-9
    )


def test_a_damping_far_off_is_clearly_behind_and_the_best_is_not() -> None:
    """The study's own damping is compared, between those of the list too."""
    phi = _samples(300, 20, 6)
    run = _trained(phi, phi @ np.random.default_rng(7).standard_normal(20), 300)
    best = suggest_damping([run], 30)
    assert best is not None
    assert best.is_clear
    assert best.low <= best.agreement - best.own <= best.high
    own = suggest_damping([run], best.damping)
    assert own is not None
    assert not own.is_clear
    assert own.own == own.agreement
    near = suggest_damping([run], best.damping * 1.2)
    assert near is not None
    assert own.agreement > near.own > best.own


def test_changes_that_say_nothing_suggest_nothing() -> None:
    """Changes by chance, by gradients' lengths alone, none at all, or of few samples."""
    rng = np.random.default_rng(8)
    phi = _samples(300, 20, 9)
    lengths = np.linalg.norm(phi, axis=1)
    changes = _foretold(phi, np.ones(300))
    for happened in (rng.standard_normal(300), 5 * lengths + 1, np.zeros(300)):
        assert suggest_damping([Foretold(changes, lengths, happened)], 2) is None
    run = _trained(phi, phi @ rng.standard_normal(20), 30)
    few = Foretold(run.changes[:29], run.lengths[:29], run.happened[:29])
    assert suggest_damping([few], 2) is None
    assert suggest_damping([], 2) is None


@pytest.mark.parametrize("n", [1, 2, 1999, 2000, 2001, 123_457])
def test_foretold_samples_are_spread_over_all(n: int) -> None:
    """At most 2,000 different ones, the first and the last among them."""
    rows = foretold_samples(n)
    assert len(rows) == min(n, 2000)
    assert (rows[0], rows[-1]) == (0, n - 1)
    assert (np.diff(rows) > 0).all()

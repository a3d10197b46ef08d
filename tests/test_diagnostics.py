import numpy as np
import pytest

from trak_core.diagnostics import (
    inner_product_agreement,
    inner_product_sd,
    norm_sd,
    peakedness,
    squared_norm_agreement,
)
from trak_core.errors import InputError
from trak_core.projection import project
from trak_core.spec import ProjectionKind, ProjectionSpec

RNG = np.random.default_rng(0)
# Rows of a few large entries and of many small ones, some of them close to each other.
ROWS = RNG.standard_normal((12, 30)) * np.geomspace(1, 20, 12)[:, None] ** np.linspace(-1, 1, 30)
ROWS[5] = ROWS[4] + 0.1 * ROWS[5]
KERNEL = ROWS @ ROWS.T
PROJ_DIM = 64


def features(kind, n_streams, proj_dim=PROJ_DIM):
    for stream in range(n_streams):
        spec = ProjectionSpec(kind=kind, n_params=30, proj_dim=proj_dim, seed=1, stream=stream)
        yield spec.scale * np.asarray(project(ROWS.astype(np.float32), spec))


def peaks_of(kind):
    if kind == "normal":
        return np.zeros((12, 12))
    return peakedness(np.split(ROWS, [7, 8], axis=1))


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
def test_theory_predicts_the_errors(kind):
    """Over 200 independent matrices, the measured mean square is the predicted variance."""
    streams = list(features(ProjectionKind(kind), 200))
    peaks = peaks_of(kind)
    norms = squared_norm_agreement(KERNEL, streams, norm_sd(PROJ_DIM, np.diagonal(peaks)))
    pairs = inner_product_agreement(KERNEL, streams, inner_product_sd(PROJ_DIM, KERNEL, peaks))
    for found in (norms, pairs):
        assert found.n_streams == 200
        # The mean of roots lies below the root of means, by less than the spread of streams.
        assert found.measured == pytest.approx(found.predicted, rel=0.1)
        assert 0 < found.standard_error < 0.1 * found.measured


def test_the_bound_without_peakedness_is_that_of_normal_entries():
    wide = inner_product_sd(PROJ_DIM, KERNEL)
    assert (inner_product_sd(PROJ_DIM, KERNEL, peaks_of("rademacher")) <= wide).all()
    np.testing.assert_allclose(np.diagonal(wide), norm_sd(PROJ_DIM, np.zeros(12)))


def test_no_error_where_there_is_none():
    found = squared_norm_agreement(KERNEL, [ROWS], np.zeros(12))
    assert found.measured < 1e-12
    assert np.isnan(found.standard_error)
    found = inner_product_agreement(KERNEL, [ROWS, ROWS], np.zeros((12, 12)))
    assert found.measured < 1e-12
    assert found.standard_error < 1e-12


def test_errors_by_hand():
    kernel = np.array([[4.0, 0], [0, 1]])
    rows = np.array([[2.0, 0], [0.5, 1]])
    norms = squared_norm_agreement(kernel, [rows], np.zeros(2))
    assert norms.measured == pytest.approx(np.sqrt((0 + 0.25**2) / 2))
    pairs = inner_product_agreement(kernel, [rows], np.zeros((2, 2)))
    assert pairs.measured == pytest.approx(1 / 2)


def test_what_is_refused():
    zero = np.array([[1.0, 0], [0, 0]])
    with pytest.raises(InputError, match=r"rows \[1\]"):
        squared_norm_agreement(zero, [np.eye(2)], np.zeros(2))
    with pytest.raises(InputError, match="at least one stream"):
        squared_norm_agreement(KERNEL, [], np.zeros(12))
    with pytest.raises(InputError, match="at least two samples"):
        inner_product_agreement(np.eye(1), [np.eye(1)], np.zeros((1, 1)))


def test_peakedness_by_hand():
    rows = np.array([[2.0, 0, 0], [1, 1, 0], [0, 0, 3]])
    expected = [[1, 1 / 2, 0], [1 / 2, 1 / 2, 0], [0, 0, 1]]
    np.testing.assert_allclose(peakedness([rows[:, :1], rows[:, 1:]]), expected)

import itertools

import numpy as np
import pytest
from scipy.linalg import hadamard

from trak_core.errors import InputError
from trak_core.model.sampled import peaks_of
from trak_core.projection import project
from trak_core.spec import ProjectionKind, ProjectionSpec
from trak_core.trust.distortion import (
    inner_product_agreement,
    inner_product_sd,
    peakedness,
    spread_norm_sd,
    squared_norm_agreement,
)

RNG = np.random.default_rng(0)
# Rows of a few large entries and of many small ones, some of them close to each other.
ROWS = RNG.standard_normal((12, 30)) * np.geomspace(1, 20, 12)[:, None] ** np.linspace(-1, 1, 30)
ROWS[5] = ROWS[4] + 0.1 * ROWS[5]
GRAMIAN = ROWS @ ROWS.T
KINDS = [str(kind) for kind in ProjectionKind if kind.about.tag is not None]
PROJ_DIM = 8


def spec_of(kind, stream=0):
    kind = ProjectionKind(kind)
    shapes = [(6, 4), (6, 1)] if kind.about.of_matrices else None
    return ProjectionSpec(
        kind=kind, n_params=30, proj_dim=PROJ_DIM, seed=1, stream=stream, shapes=shapes
    )


def predicted(kind, rows, gramian, proj_dim=PROJ_DIM):
    peaks = peaks_of(rows, rows, spec_of(kind))
    return inner_product_sd(proj_dim, gramian, peaks)


@pytest.mark.parametrize("kind", KINDS)
def test_theory_predicts_the_errors(kind):
    """Over 400 independent matrices; that of another kind is told apart."""
    rows = ROWS.astype(np.float32)
    streams = [project(rows, spec_of(kind, stream), scale=True) for stream in range(400)]
    for agreement in (squared_norm_agreement, inner_product_agreement):
        found = agreement(GRAMIAN, streams, predicted(kind, ROWS, GRAMIAN))
        assert len(found.by_stream) == 400
        assert 0 < found.standard_error < 0.05 * found.measured
        assert abs(found.measured - found.predicted) < 3 * found.standard_error
    other = "rademacher" if spec_of(kind).lossless_block is None else "normal"
    found = squared_norm_agreement(GRAMIAN, streams, predicted(other, ROWS, GRAMIAN))
    assert abs(found.measured - found.predicted) > 3 * found.standard_error


@pytest.mark.parametrize("shapes", [[(20, 3)], [(3, 20)], [(20, 1), (8, 5)], [(24, 24)]])
def test_sides_longer_than_a_tensor_sketch_are_foreseen(shapes):
    """Of norms within the errors; of inner products as an upper bound."""
    n_params = sum(a * b for a, b in shapes)
    rows = RNG.standard_normal((6, n_params))
    rows += 2 * rows.mean(0)
    gramian = rows @ rows.T
    specs = [
        ProjectionSpec(
            kind="tensor_sketch", n_params=n_params, proj_dim=8, seed=1, stream=i, shapes=shapes
        )
        for i in range(1500)
    ]
    streams = [project(rows.astype(np.float32), spec, scale=True) for spec in specs]
    sd = inner_product_sd(8, gramian, peaks_of(rows, rows, specs[0]))
    found = squared_norm_agreement(gramian, streams, sd)
    assert abs(found.measured - found.predicted) < 4 * found.standard_error
    found = inner_product_agreement(gramian, streams, sd)
    assert found.measured < found.predicted + 4 * found.standard_error


def all_matrices(kind, n_params, proj_dim):
    """Yield every value that a matrix of this kind may have, scaled, all alike likely."""
    signs = list(itertools.product((-1, 1), repeat=n_params))
    if kind == "rademacher":
        # Columns are independent and alike: k = 1 says it all.
        yield from (np.array(column)[:, None] for column in signs)
    elif kind == "sjlt":  # of one stripe
        for buckets in itertools.product(range(proj_dim), repeat=n_params):
            for column in signs:
                yield np.array(column)[:, None] * np.eye(proj_dim)[list(buckets)]
    else:
        n_blocks = n_params // proj_dim
        for own in itertools.product((-1, 1), repeat=n_blocks * proj_dim):
            of_blocks = np.array(own).reshape(n_blocks, 1, proj_dim)
            for column in signs:
                rows = np.array(column).reshape(n_blocks, proj_dim, 1)
                matrix = rows * hadamard(proj_dim) * of_blocks
                yield matrix.reshape(n_params, proj_dim) / np.sqrt(proj_dim)


@pytest.mark.parametrize(("kind", "proj_dim"), [("rademacher", 1), ("sjlt", 2), ("hadamard", 2)])
def test_the_prediction_is_the_variance_over_all_matrices(kind, proj_dim):
    """Exactly, for each pair of gradients: the formula against an average over every matrix."""
    rows = RNG.standard_normal((5, 4))
    gramian = rows @ rows.T
    total, square, n = np.zeros((5, 5)), np.zeros((5, 5)), 0
    for matrix in all_matrices(kind, 4, proj_dim):
        products = (rows @ matrix) @ (rows @ matrix).T
        total, square, n = total + products, square + (products - gramian) ** 2, n + 1
    np.testing.assert_allclose(total / n, gramian, atol=1e-12)
    block = {"rademacher": 1, "sjlt": 1, "hadamard": proj_dim}[kind]
    norms = np.sqrt(np.diagonal(gramian))
    found = inner_product_sd(proj_dim, gramian, peakedness(rows, rows, block))
    np.testing.assert_allclose(found, np.sqrt(square / n) / np.outer(norms, norms), atol=1e-12)


def test_the_formulas_of_normal_and_rademacher():
    """sqrt(2/k), sqrt((1 + cos^2)/k); sqrt((2/k) (1 - sum x^4 / |x|^4)) for random signs."""
    wide = predicted("normal", ROWS, GRAMIAN, proj_dim=64)
    np.testing.assert_allclose(np.diagonal(wide), np.sqrt(2 / 64))
    assert spread_norm_sd(64) == np.sqrt(2 / 64)
    cosine = GRAMIAN[2, 7] / np.sqrt(GRAMIAN[2, 2] * GRAMIAN[7, 7])
    assert wide[2, 7] == pytest.approx(np.sqrt((1 + cosine**2) / 64))
    narrow = predicted("rademacher", ROWS, GRAMIAN, proj_dim=64)
    peaks = (ROWS**4).sum(1) / (ROWS**2).sum(1) ** 2
    np.testing.assert_allclose(np.diagonal(narrow), np.sqrt(2 / 64 * (1 - peaks)))
    assert (narrow <= wide).all()


@pytest.mark.parametrize("block", [1, 4, 7, 1500, 4096])
def test_peakedness_is_its_formula(block):
    x, y = RNG.standard_normal((3, 2500)), RNG.standard_normal((2, 2500)) * np.arange(2500)
    for i, j in itertools.product(range(3), range(2)):
        parts = [(x[i, s : s + block], y[j, s : s + block]) for s in range(0, 2500, block)]
        found = sum((a @ a) * (b @ b) + (a @ b) ** 2 for a, b in parts)
        expected = found / (2 * (x[i] @ x[i]) * (y[j] @ y[j]))
        assert peakedness(x, y, block)[i, j] == pytest.approx(expected)


def test_peakedness_by_hand():
    rows = np.array([[2.0, 0, 0], [1, 1, 0], [0, 0, 3]], np.float32)
    np.testing.assert_allclose(
        peakedness(rows, rows, 1), [[1, 1 / 2, 0], [1 / 2, 1 / 2, 0], [0, 0, 1]]
    )
    np.testing.assert_allclose(peakedness(rows, rows, 2), [[1, 3 / 4, 0], [3 / 4, 1, 0], [0, 0, 1]])


def test_gradients_of_any_size():
    """Fourth powers of float32's extremes are beyond float32."""
    rows = np.array([[1e-30, 2e-30, 1e-30], [1e30, -1e30, 3e30]], np.float32)
    expected = peakedness(np.array([[1, 2, 1], [1, -1, 3.0]]), np.array([[1, 2, 1], [1, -1, 3]]), 1)
    np.testing.assert_allclose(peakedness(rows, rows, 1), expected, rtol=1e-6)


def test_rounding_makes_no_negative_variance():
    """Gradients within one block are kept exactly."""
    rows = RNG.standard_normal((200, 30))
    sd = inner_product_sd(64, rows @ rows.T, peakedness(rows, rows, 32))
    assert (sd < 1e-7).all()


def test_no_error_where_there_is_none():
    found = squared_norm_agreement(GRAMIAN, [ROWS], np.zeros((12, 12)))
    assert found.measured < 1e-12
    assert np.isnan(found.standard_error)
    found = inner_product_agreement(GRAMIAN, [ROWS, ROWS], np.zeros((12, 12)))
    assert found.measured < 1e-12
    assert found.standard_error < 1e-12
    found = squared_norm_agreement(np.eye(2), [np.eye(2), np.eye(2)], np.zeros((2, 2)))
    assert (found.measured, found.standard_error) == (0, 0)


def test_errors_by_hand():
    gramian = np.array([[4.0, 0], [0, 1]])
    rows = np.array([[2.0, 0], [0.5, 1]])
    sd = np.array([[0.3, 0.7], [0.7, 0.4]])
    norms = squared_norm_agreement(gramian, [rows, np.diag([2.0, 1])], sd)
    assert norms.by_stream == pytest.approx([np.sqrt((0 + 0.25**2) / 2), 0])
    assert norms.measured == pytest.approx(np.sqrt(0.25**2 / 4))
    # The mean square 1/64 has the standard error 1/64; its root half the relative one.
    assert norms.standard_error == pytest.approx(norms.measured / 2)
    assert norms.predicted == pytest.approx(np.sqrt((0.3**2 + 0.4**2) / 2))
    pairs = inner_product_agreement(gramian, [rows], sd)
    assert pairs.measured == pytest.approx(1 / 2)
    assert pairs.predicted == pytest.approx(0.7)


def test_what_is_refused():
    zero = np.array([[1.0, 0], [0, 0]])
    with pytest.raises(InputError, match=r"rows \[1\]"):
        squared_norm_agreement(zero, [np.eye(2)], np.zeros((2, 2)))
    with pytest.raises(InputError, match=r"rows \[1\]"):
        inner_product_sd(4, zero, np.zeros((2, 2)))
    with pytest.raises(InputError, match="at least one stream"):
        squared_norm_agreement(GRAMIAN, [], np.zeros((12, 12)))
    with pytest.raises(InputError, match="at least two samples"):
        inner_product_agreement(np.eye(1), [np.eye(1)], np.zeros((1, 1)))

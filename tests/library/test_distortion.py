"""What a projection's distortion must be, and how it is measured."""

import itertools

import numpy as np
import pytest
from scipy.linalg import hadamard

from trak_core.evaluation import distortion
from trak_core.evaluation.distortion import agreement, product_variances
from trak_core.projection import project
from trak_core.projection.reference import project_reference
from trak_core.spec import ProjectionKind, ProjectionSpec

RNG = np.random.default_rng(0)
# Rows of a few large entries and of many small ones, some of them close to each other.
ROWS = RNG.standard_normal((12, 30)) * np.geomspace(1, 20, 12)[:, None] ** np.linspace(-1, 1, 30)
ROWS[5] = ROWS[4] + 0.1 * ROWS[5]
GRAMIAN = ROWS @ ROWS.T
KINDS = [str(kind) for kind in ProjectionKind if kind.about.tag is not None]
PROJ_DIM = 8


def spec_of(kind, n_params=30, proj_dim=PROJ_DIM, stream=0, shapes=((6, 4), (6, 1))):
    return ProjectionSpec(
        kind=ProjectionKind(kind),
        n_params=n_params,
        proj_dim=proj_dim,
        seed=1,
        stream=stream,
        shapes=shapes if ProjectionKind(kind).about.of_matrices else None,
    )


def relative_sd(rows, spec):
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return np.sqrt(product_variances(rows, rows, spec)) / np.outer(lengths, lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_theory_predicts_the_errors(kind):
    """Over 400 independent matrices, by their definition; that of another kind is told apart."""
    specs = [spec_of(kind, stream=stream) for stream in range(400)]
    streams = [spec.scale * project_reference(ROWS, spec) for spec in specs]
    errors = agreement(GRAMIAN, product_variances(ROWS, ROWS, spec_of(kind)), streams)
    assert list(errors) == ["squared_norm", "inner_product"]
    for measured, standard_error, predicted in errors.values():
        assert 0 < standard_error < 0.05 * measured
        assert abs(measured - predicted) < 3 * standard_error
    other = "rademacher" if spec_of(kind).lossless_block is None else "normal"
    errors = agreement(GRAMIAN, product_variances(ROWS, ROWS, spec_of(other)), streams)
    measured, standard_error, predicted = errors["squared_norm"]
    assert abs(measured - predicted) > 3 * standard_error


@pytest.mark.parametrize("shapes", [[(20, 3)], [(3, 20)], [(20, 1), (8, 5)], [(24, 24)]])
def test_sides_longer_than_a_tensor_sketch_are_foreseen(shapes):
    """Errors of norms are met within their own; those of inner products have an upper bound."""
    n_params = sum(a * b for a, b in shapes)
    rows = RNG.standard_normal((6, n_params))
    rows += 2 * rows.mean(0)
    specs = [spec_of("tensor_sketch", n_params, stream=i, shapes=shapes) for i in range(1500)]
    streams = [project(rows.astype(np.float32), spec, scale=True) for spec in specs]
    errors = agreement(rows @ rows.T, product_variances(rows, rows, specs[0]), streams)
    measured, standard_error, predicted = errors["squared_norm"]
    assert abs(measured - predicted) < 4 * standard_error
    measured, standard_error, predicted = errors["inner_product"]
    assert measured < predicted + 4 * standard_error


def all_matrices(kind, n_params, proj_dim):
    """Yield every value that a matrix of this kind may have, scaled, all alike likely."""
    signs = list(itertools.product((-1, 1), repeat=n_params))
    if kind == "rademacher":
        # Columns are independent and alike: k = 1 says it all.
        yield from (np.array(column)[:, None] for column in signs)
    else:
        n_blocks = n_params // proj_dim
        for own in itertools.product((-1, 1), repeat=n_blocks * proj_dim):
            of_blocks = np.array(own).reshape(n_blocks, 1, proj_dim)
            for column in signs:
                rows = np.array(column).reshape(n_blocks, proj_dim, 1)
                matrix = rows * hadamard(proj_dim) * of_blocks
                yield matrix.reshape(n_params, proj_dim) / np.sqrt(proj_dim)


@pytest.mark.parametrize(("kind", "proj_dim"), [("rademacher", 1), ("hadamard", 2)])
def test_the_prediction_is_the_variance_over_all_matrices(kind, proj_dim):
    """Exactly, for each pair of gradients: the formula against an average over every matrix."""
    rows = RNG.standard_normal((5, 4))
    gramian = rows @ rows.T
    total, square, n = np.zeros((5, 5)), np.zeros((5, 5)), 0
    for matrix in all_matrices(kind, 4, proj_dim):
        products = (rows @ matrix) @ (rows @ matrix).T
        total, square, n = total + products, square + (products - gramian) ** 2, n + 1
    np.testing.assert_allclose(total / n, gramian, atol=1e-12)
    variances = product_variances(rows, rows, spec_of(kind, 4, proj_dim))
    np.testing.assert_allclose(variances, square / n, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "block"),
    [("normal", None), ("rademacher", 1), ("hadamard", 4), ("hadamard", 512), ("hadamard", 4096)],
)
def test_variances_are_their_formula(kind, block):
    """Blocks that end with the gradient, and a last block that is shorter; ``normal`` has none."""
    x, y = RNG.standard_normal((3, 2500)), RNG.standard_normal((2, 2500)) * np.arange(2500)
    k = block if kind == "hadamard" else 64
    variances = product_variances(x, y, spec_of(kind, 2500, k))
    for i, j in itertools.product(range(3), range(2)):
        starts = range(0, 2500, block) if block else ()
        parts = [(x[i, s : s + block], y[j, s : s + block]) for s in starts]
        kept = sum((a @ a) * (b @ b) + (a @ b) ** 2 for a, b in parts)
        total = (x[i] @ x[i]) * (y[j] @ y[j]) + (x[i] @ y[j]) ** 2
        assert variances[i, j] == pytest.approx((total - kept) / k, abs=1e-12 * total)


@pytest.mark.parametrize("kind", ["rademacher", "tensor_sketch"])
def test_gradients_of_any_size(kind):
    """Fourth powers of float32's extremes are beyond float32."""
    plain = RNG.integers(1, 4, (2, 30)).astype(np.float64)
    rows = (plain * [[1e-30], [1e30]]).astype(np.float32)
    expected = relative_sd(plain, spec_of(kind))
    scaled = relative_sd(rows.astype(np.float64), spec_of(kind))
    np.testing.assert_allclose(scaled, expected, rtol=1e-6)
    np.testing.assert_allclose(relative_sd(rows, spec_of(kind)), expected, rtol=1e-5)


def test_rounding_makes_no_negative_variance():
    """Gradients within one block are kept exactly."""
    rows = RNG.standard_normal((200, 30))
    assert (relative_sd(rows, spec_of("hadamard", proj_dim=64)) < 1e-7).all()


def test_inner_products_of_many_columns():
    """More than fit one piece."""
    x, y = RNG.standard_normal((2, 700_000), np.float32), RNG.standard_normal((1, 700_000))
    products = distortion.inner_products(x, y)
    np.testing.assert_allclose(products, x.astype(np.float64) @ y.T, rtol=1e-10)


def test_no_error_where_there_is_none():
    for streams in ([ROWS], [ROWS, ROWS]):
        for measured, standard_error, _ in agreement(GRAMIAN, 0 * GRAMIAN, streams).values():
            assert measured < 1e-12
            assert np.isnan(standard_error) if len(streams) == 1 else standard_error < 1e-12
    errors = agreement(np.eye(2), np.zeros((2, 2)), [np.eye(2), np.eye(2)])
    assert set(errors.values()) == {(0, 0, 0)}


def test_errors_by_hand():
    gramian = np.array([[4.0, 0], [0, 1]])
    rows = np.array([[2.0, 0], [0.5, 1]])
    sd = np.array([[0.3, 0.7], [0.7, 0.4]])
    variances = sd**2 * np.outer([4, 1], [4, 1])
    errors = agreement(gramian, variances, [rows, np.diag([2.0, 1])])
    measured, standard_error, predicted = errors["squared_norm"]
    assert measured == pytest.approx(np.sqrt(0.25**2 / 4))
    # The mean square 1/64 has the standard error 1/64; its root half the relative one.
    assert standard_error == pytest.approx(measured / 2)
    assert predicted == pytest.approx(np.sqrt((0.3**2 + 0.4**2) / 2))
    measured, _, predicted = agreement(gramian, variances, [rows])["inner_product"]
    assert measured == pytest.approx(1 / 2)
    assert predicted == pytest.approx(0.7)

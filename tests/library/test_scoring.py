import numpy as np
import pytest

from trak_core.attribution import scores as of_scores
from trak_core.attribution.scores import combined, powered, similarities, unit_rows
from trak_core.attribution.solve import divide_by_lengths
from trak_core.spec import Combine

RNG = np.random.default_rng(0)


def test_similarities():
    phi, solved = RNG.standard_normal((5, 3)).astype(np.float32), RNG.standard_normal((3, 2))
    found = similarities(phi, solved)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, phi.astype(np.float64) @ solved)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_of_length_1(dtype):
    """3, 4, 5 is exact; a row of zeros has no direction."""
    rows = np.array([[3, 4], [0, 0], [0, -7]], dtype)
    kept = rows.copy()
    found = unit_rows(rows)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, [[0.6, 0.8], [0, 0], [0, -1]])
    np.testing.assert_array_equal(rows, kept)


def test_a_gramian_of_gradients_of_length_1():
    gradients, targets = RNG.standard_normal((6, 4)), RNG.standard_normal((3, 4))
    gradients[2] = 0
    gramian, cross = gradients @ gradients.T, gradients @ targets.T
    # What sums that cancel leave of zeros.
    gramian[2, 2], gramian[2, 3], gramian[3, 2], cross[2, 1] = 1e-16, 1e-16, 1e-16, -1e-16
    for left in (1e-16, -1e-16, 0):
        k, k_t = gramian.copy(), cross.copy()
        k[2, 2] = left
        divide_by_lengths(k, k_t)
        unit = unit_rows(gradients)
        np.testing.assert_allclose(k, unit @ unit.T, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(k_t, unit @ targets.T, rtol=1e-12, atol=1e-12)
        assert not k[2].any()


def test_powers_keep_the_sign():
    np.testing.assert_allclose(powered(np.float32([-4, 0, 9]), 0.5), [-2, 0, 3])
    np.testing.assert_array_equal(powered(np.float32([-4, 0, 9]), 1), [-4, 0, 9])


def test_the_ways_to_combine():
    blocks = [RNG.standard_normal((4, 2)) for _ in range(3)]
    weights = [RNG.random(4) for _ in range(3)]
    norms = [0.5, 3.0, 1e6]
    a, q = np.array(blocks), np.array(weights)

    def parts():
        return zip(blocks, weights, norms, strict=True)

    products = a * q[:, :, None]
    for way, expected in {
        Combine.PRODUCT_OF_AVERAGES: a.mean(0) * q.mean(0)[:, None],
        Combine.AVERAGE_OF_PRODUCTS: products.mean(0),
        Combine.UNIT_AVERAGE: (products / np.array(norms)[:, None, None]).mean(0),
    }.items():
        np.testing.assert_allclose(combined(parts(), way), expected)


def test_one_block_is_held_at_a_time_and_none_is_changed():
    blocks = [np.full((2, 2), c, np.float32) for c in (1, 2, 6)]
    ones = np.ones(2)
    found = combined(((block, ones, 1.0) for block in blocks), Combine.PRODUCT_OF_AVERAGES)
    np.testing.assert_array_equal(found, np.full((2, 2), 3.0))
    assert found.dtype == np.float64
    assert [block[0, 0] for block in blocks] == [1, 2, 6]


@pytest.mark.parametrize("n_checkpoints", [1, 2, 7, 300])
def test_the_most_frequent_class(n_checkpoints):
    """A tie goes to the label if its mean log-odds are above 0, else to the smallest other."""
    classes = RNG.integers(-1, 4, (n_checkpoints, 200))
    labels, outputs = RNG.integers(-1, 4, 200), RNG.standard_normal((n_checkpoints, 200))

    def of_row(own, label, likely):
        most = max(map(own.count, own))
        tied = sorted({k for k in own if own.count(k) == most})
        if label in tied and (likely or tied == [label]):
            return label
        return min(k for k in tied if k != label)

    likely = outputs.mean(axis=0) > 0
    expected = [of_row(*row) for row in zip(classes.T.tolist(), labels, likely, strict=True)]
    mine = of_scores.most_frequent(classes, labels, outputs)
    np.testing.assert_array_equal(mine, expected)
    assert mine.dtype == classes.dtype


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 22]])
@pytest.mark.parametrize("keep", [1, 5, 100])
def test_largest_entries_whatever_the_blocks(cuts, keep):
    scores = RNG.integers(-2, 4, (23, 6)).astype(np.float32)  # with ties
    scores[:, :2] = np.sort(scores[:, :2], axis=0)  # rising, and falling
    scores[:, 1] *= -1
    scores[:, 2] = 0
    seen, start = None, 0
    for block in np.split(scores, cuts):
        seen = of_scores.largest(seen, start, block, keep)
        start += len(block)
    order = np.argsort(-scores, axis=0, kind="stable")[:keep]
    np.testing.assert_array_equal(seen.rows, order)
    np.testing.assert_array_equal(seen.scores, np.take_along_axis(scores, order, axis=0))

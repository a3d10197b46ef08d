import numpy as np
import pytest

from trak_core.scoring.scores import combined, largest, most_frequent, similarities
from trak_core.scoring.weights import powered
from trak_core.spec import Combine

RNG = np.random.default_rng(0)


def test_similarities():
    phi, solved = RNG.standard_normal((5, 3)).astype(np.float32), RNG.standard_normal((3, 2))
    found = similarities(phi, solved)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, phi.astype(np.float64) @ solved)


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

    np.testing.assert_allclose(
        combined(parts(), Combine.PRODUCT_OF_AVERAGES), a.mean(0) * q.mean(0)[:, None]
    )
    np.testing.assert_allclose(
        combined(parts(), Combine.AVERAGE_OF_PRODUCTS), (a * q[:, :, None]).mean(0)
    )
    np.testing.assert_allclose(
        combined(parts(), Combine.UNIT_AVERAGE),
        (a * q[:, :, None] / np.array(norms)[:, None, None]).mean(0),
    )


def test_they_agree_for_one_checkpoint():
    block, weight = RNG.standard_normal((4, 2)), RNG.random(4)
    ways = [combined([(block, weight, 1.0)], way) for way in Combine]
    np.testing.assert_allclose(ways, [ways[0]] * 3)


def test_one_block_is_held_at_a_time_and_none_is_changed():
    blocks = [np.full((2, 2), c, np.float32) for c in (1, 2, 6)]
    ones = np.ones(2)
    found = combined(((block, ones, 1.0) for block in blocks), Combine.PRODUCT_OF_AVERAGES)
    np.testing.assert_array_equal(found, np.full((2, 2), 3.0))
    assert found.dtype == np.float64
    assert [block[0, 0] for block in blocks] == [1, 2, 6]


@pytest.mark.parametrize("n_checkpoints", [1, 2, 7, 300])
def test_the_most_frequent_class(n_checkpoints):
    classes = RNG.integers(-1, 4, (n_checkpoints, 50))
    expected = [min(set(c), key=lambda k: (-c.count(k), k)) for c in classes.T.tolist()]
    np.testing.assert_array_equal(most_frequent(classes), expected)


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 22]])
@pytest.mark.parametrize("keep", [1, 5, 100])
def test_largest_entries_whatever_the_blocks(cuts, keep):
    scores = RNG.integers(0, 6, (23, 4)).astype(np.float32)  # with ties
    seen, start = None, 0
    for block in np.split(scores, cuts):
        seen = largest(seen, start, block, keep)
        start += len(block)
    order = np.argsort(-scores, axis=0, kind="stable")[:keep]
    np.testing.assert_array_equal(seen.rows, order)
    np.testing.assert_array_equal(seen.scores, np.take_along_axis(scores, order, axis=0))

import hashlib

import numpy as np
import pytest

from trak_core.errors import InputError
from trak_core.projection import project
from trak_core.projection.cpu import rademacher_tile_cpu
from trak_core.projection.reference import (
    philox4x32_reference,
    project_reference,
    projection_matrix,
)
from trak_core.spec import ProjectionSpec, stream_of

# Odd, prime and off-by-one sizes: no block of coordinates or of columns divides them.
SHAPES = [(1, 1, 1), (3, 31, 5), (2, 127, 7), (2, 129, 33), (7, 257, 64), (5, 1000, 130)]
FAR = 2**32 * 8 + 77


def rademacher(n_params, proj_dim, seed=0, stream=0):
    return ProjectionSpec(
        kind="rademacher", n_params=n_params, proj_dim=proj_dim, seed=seed, stream=stream
    )


def integer_gradients(n_samples, n_params):
    """Small integers: float32 sums of them are exact, whatever the order of summation."""
    rng = np.random.default_rng(0)
    return rng.integers(-8, 9, (n_samples, n_params)).astype(np.float32)


def tile(spec, first, n_rows):
    out = np.full((n_rows, spec.proj_dim), np.nan, np.float32)
    halves = np.uint32(spec.seed & 0xFFFFFFFF), np.uint32(spec.seed >> 32)
    rademacher_tile_cpu(out, first, *halves, np.uint32(spec.stream))
    return out


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    words = philox4x32_reference(np.array(counter, np.uint64)[:, None], key)
    assert tuple(int(word) for word in words[:, 0]) == expected


def test_an_entry_is_the_bit_that_the_specification_names():
    """One entry by hand, from the words of one Philox call."""
    seed, stream, g, j = (5 << 32) + 77, 9, FAR, 6
    q = 4 * (g >> 7) + ((g >> 1) & 3)
    counter = np.array([j >> 2, q & 0xFFFFFFFF, q >> 32, stream], np.uint64)[:, None]
    word = int(philox4x32_reference(counter, (77, 5))[j & 3, 0])
    bit = 2 * ((g >> 4) & 7) + ((g >> 3) & 1) + 16 * (g & 1)
    expected = -1 if word >> bit & 1 else 1
    assert projection_matrix(rademacher(FAR + 1, 7, seed, stream), FAR)[0, j] == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (0, "323df1bcab3e6546"),
        (FAR, "fe972f788ff9a0ef"),
    ],
)
def test_the_matrix_never_changes(first, expected):
    """Pinned: features on disk were made with these entries."""
    entries = projection_matrix(rademacher(2**40, 37, (5 << 32) + 77, 9), first, 300)
    assert hashlib.blake2b(entries.astype(np.int8), digest_size=8).hexdigest() == expected


@pytest.mark.parametrize("first", [0, 1, 127, 130, 2**34 + 5, FAR])
@pytest.mark.parametrize("proj_dim", [1, 4, 37])
def test_cpu_matrix_equals_reference(first, proj_dim):
    spec = rademacher(2**40, proj_dim, (5 << 32) + 77, 2**32 - 1)
    np.testing.assert_array_equal(tile(spec, first, 300), projection_matrix(spec, first, 300))


@pytest.mark.parametrize(("n_samples", "n_params", "proj_dim"), SHAPES)
def test_cpu_projection_equals_reference(n_samples, n_params, proj_dim):
    spec = rademacher(n_params, proj_dim)
    gradients = integer_gradients(n_samples, n_params)
    np.testing.assert_array_equal(project(gradients, spec), project_reference(gradients, spec))


def test_columns_are_nested():
    wide = projection_matrix(rademacher(200, 64))
    np.testing.assert_array_equal(projection_matrix(rademacher(200, 17)), wide[:, :17])


@pytest.mark.parametrize("cuts", [[1], [128], [5, 131, 900], [127, 128, 129]])
def test_chunks_of_coordinates_add_up(cuts):
    spec = rademacher(1000, 33)
    gradients = integer_gradients(4, 1000)
    out = np.full((4, 33), np.nan, np.float32)
    parts = np.split(gradients, cuts, axis=1)
    for i, part in enumerate(parts):
        offset = sum(p.shape[1] for p in parts[:i])
        project(
            np.ascontiguousarray(part), spec, offset=offset, out=out, accumulate=i > 0, threads=2
        )
    np.testing.assert_array_equal(out, project(gradients, spec))


def test_many_tiles_equal_reference(monkeypatch):
    monkeypatch.setattr("trak_core.projection.cpu._TILE_BYTES", 128 * 4 * 9)
    spec = rademacher(1000, 9)
    gradients = integer_gradients(3, 1000)
    np.testing.assert_array_equal(project(gradients, spec), project_reference(gradients, spec))


def test_batches_and_threads_do_not_change_the_result():
    spec = rademacher(501, 17)
    gradients = integer_gradients(9, 501)
    parts = [project(part, spec, threads=2) for part in np.split(gradients, [1, 6])]
    np.testing.assert_array_equal(np.concatenate(parts), project(gradients, spec))


def test_inner_products_are_kept_on_average():
    gradients = integer_gradients(2, 64)
    rows = [project(gradients, rademacher(64, 32, stream=s), scale=True) for s in range(400)]
    estimates = [float(a @ b) for a, b in rows]
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - float(gradients[0] @ gradients[1])) < 3 * error


def test_streams_and_seeds_are_uncorrelated():
    matrices = [
        projection_matrix(rademacher(512, 64, seed, stream)).ravel()
        for seed, stream in [(0, 0), (0, 1), (1, 0), (1 << 32, 0), (0, stream_of("seed0"))]
    ]
    correlation = np.corrcoef(matrices) - np.eye(len(matrices))
    assert np.abs(correlation).max() < 4 / np.sqrt(512 * 64)


def test_tiny_gradients_survive():
    gradients = 1e-8 * np.random.default_rng(0).standard_normal((3, 700)).astype(np.float32)
    spec = rademacher(700, 20)
    expected = project_reference(gradients, spec)
    error = np.abs(project(gradients, spec) - expected).max()
    assert error < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": np.zeros((2, 10))}, "float32"),
        ({"gradients": np.zeros(10, np.float32)}, r"shape \(10,\)"),
        ({"offset": 1}, "columns 1 to 11"),
        ({"offset": -1}, "columns -1 to 9"),
        ({"out": np.zeros((2, 4), np.float32)}, r"\(2, 3\)"),
        ({"accumulate": True}, "out=None"),
    ],
)
def test_bad_arguments_are_explained(arguments, message):
    gradients = arguments.pop("gradients", np.zeros((2, 10), np.float32))
    with pytest.raises(InputError, match=message):
        project(gradients, rademacher(10, 3), **arguments)


@pytest.mark.parametrize(
    "field",
    [
        {"kind": "radmacher"},
        {"n_params": 0},
        {"n_params": 2**56},
        {"proj_dim": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"stream": 2**32},
        {"version": 2},
    ],
)
def test_fields_out_of_range_are_refused(field):
    good = {"kind": "rademacher", "n_params": 5, "proj_dim": 2, "seed": 0, "stream": 0}
    with pytest.raises(InputError, match=next(iter(field))):
        ProjectionSpec(**(good | field))


def test_empty_batch():
    empty = np.zeros((0, 10), np.float32)
    assert project(empty, rademacher(10, 3)).shape == (0, 3)

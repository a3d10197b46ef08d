"""The projection on a CPU against its definition."""

import hashlib
import os
import shutil
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import run_python
from projections import KINDS, SEED, real_gradients, spec_of, spec_with

import trak_core
from trak_core.projection import back_project, project
from trak_core.projection.cpu.project import _slice_rows, slice_length
from trak_core.projection.reference import philox4x32_reference, projection_matrix
from trak_core.settings import ProjectionKind

# Odd, prime and off-by-one sizes: no block of coordinates, samples or columns divides them.
SHAPES = [(1, 1, 1), (3, 31, 5), (2, 127, 7), (9, 129, 33), (7, 257, 64), (17, 1000, 130)]
FAR = 2**32 * 8 + 77


def integer_gradients(n_samples, n_params):
    """Small integers: float32 sums of them are exact, whatever the order of summation."""
    rng = np.random.default_rng(0)
    return rng.integers(-8, 9, (n_samples, n_params)).astype(np.float32)


def check_projection(actual, gradients, spec):
    """Exact for all kinds but ``normal``, whose entries are no integers."""
    assert actual.dtype == np.float32
    expected = gradients.astype(np.float64) @ projection_matrix(spec)
    if spec.kind == "normal":
        assert np.abs(actual - expected).max() <= 1e-6 * np.abs(expected).max()
        return
    np.testing.assert_array_equal(actual, expected.astype(np.float32))


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


def word(c0, q, tag, which):
    """One random word by hand, under seed SEED and stream 9."""
    counter = np.array([c0, q & 0xFFFFFFFF, q >> 32 | tag << 24, 9], np.uint64)[:, None]
    return int(philox4x32_reference(counter, (77, 5))[which, 0])


def test_a_rademacher_entry_is_the_bit_that_the_specification_names():
    g, j = FAR, 6
    bit = 2 * ((g >> 4) & 7) + ((g >> 3) & 1) + 16 * (g & 1)
    expected = -1 if word(j >> 2, 4 * (g >> 7) + ((g >> 1) & 3), 0, j & 3) >> bit & 1 else 1
    assert projection_matrix(spec_of("rademacher", FAR + 1, 7), FAR)[0, j] == expected


def test_a_normal_entry_is_the_polynomial_of_the_bytes_of_its_word():
    g, j = FAR, 6
    x = (sum(word(j >> 2, g, 1, j & 3).to_bytes(4, "little")) - 510) / 147.80166
    expected = x * (0.967765 + x**2 * (0.004002 + x**2 * 0.001905))
    actual = projection_matrix(spec_of("normal", FAR + 1, 7), FAR)[0, j]
    assert actual == pytest.approx(expected, rel=1e-6)


def test_a_hadamard_entry_is_the_product_of_three_signs():
    g, j, k = 64 * 2**30 + 37, 43, 64
    block, i = g // k, g % k
    row = word(0, block, 3, i >> 5) >> (i & 31)
    column = word(2**31, block, 3, j >> 5) >> (j & 31)
    expected = (-1) ** (row + column + (i & j).bit_count())
    assert projection_matrix(spec_of("hadamard", g + 1, k), g)[0, j] == expected


def test_an_entry_of_a_tensor_sketch_is_two_signs_in_the_sum_of_two_buckets():
    shapes, k, i, j = [(3, 5), (300, 40), (7, 1)], 48, 130, 39
    spec = spec_with(shapes, k, seed=SEED, stream=9)
    column, sign = 0, 1
    for q, index in ((2, i), (3, j)):  # the second parameter's rows, and its columns
        run = range(index // k * k, index // k * k + k)
        words = [(word(at >> 2, q, 4, at & 3), at) for at in run]
        column += sorted(words).index(words[index % k])
        w = index >> 5
        sign *= (-1) ** (word((w >> 2) + 2**31, q, 4, w & 3) >> (index & 31) & 1)
    expected = np.zeros(k)
    expected[column % k] = sign
    np.testing.assert_array_equal(projection_matrix(spec, 15 + 40 * i + j, 1)[0], expected)


# Pinned: features on disk were made with these entries. Digests of 300 rows and 64 columns as
# float32, from row 0 and from row FAR on.
KNOWN_ANSWERS = {
    "rademacher": ("ab8c871e8b64f4c1", "af1dc09ea3fe07de"),
    "normal": ("4e4024286cf8371a", "3aeb8c911643cb20"),
    "hadamard": ("c49a299ebe284cb5", "ad6df384f83be2ea"),
    "tensor_sketch": ("3e11c98bb0eb4d2a", "600235a2df92970f"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_never_changes(kind):
    for first, digest in zip((0, FAR), KNOWN_ANSWERS[kind], strict=True):
        entries = projection_matrix(spec_of(kind, 2**40, 64), first, 300).astype(np.float32)
        assert hashlib.blake2b((entries + 0.0).tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
@pytest.mark.parametrize(("proj_dim", "stream"), [(1, 0), (4, 2**32 - 1), (37, 9), (300, 1)])
def test_matrix_on_the_cpu_equals_reference(kind, proj_dim, stream):
    """Bit by bit: a row of the identity picks a row of R."""
    n = 200
    for first in [0] if kind == "identity" else [0, 1, 127, 130, 2**34 + 5, FAR]:
        # In the middle of a tensor sketch's matrix, which is no larger than need be.
        spec = spec_of(
            kind, n if kind == "identity" else first * 5 // 4 + n, proj_dim, stream=stream
        )
        matrix = project(np.eye(n, dtype=np.float32), spec, offset=first)
        expected = projection_matrix(spec, first, n).astype(np.float32)
        np.testing.assert_array_equal(matrix, expected, err_msg=f"from row {first}")


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
def test_projection_equals_reference(kind):
    for n_samples, n_params, proj_dim in SHAPES:
        spec = spec_of(kind, n_params, proj_dim)
        gradients = integer_gradients(n_samples, n_params)
        check_projection(project(gradients, spec), gradients, spec)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_whose_columns_are_nested_say_so(kind):
    wide = spec_of(kind, 200, 64)
    narrow = [spec_of(kind, 200, proj_dim) for proj_dim in (16, 17)]
    nested = [
        np.array_equal(projection_matrix(one), projection_matrix(wide)[:, : one.proj_dim])
        for one in narrow
    ]
    assert nested == [wide.is_nested] * 2


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
def test_chunks_of_coordinates_add_up(kind):
    spec = spec_of(kind, 1000, 64)
    gradients = integer_gradients(4, 1000)
    for cuts in [1], [128], [5, 131, 900], [127, 128, 129]:
        out = np.full((4, spec.proj_dim), np.nan, np.float32)
        for low, high in pairwise([0, *cuts, 1000]):
            part = gradients[:, low:high]
            project(part, spec, offset=low, out=out, accumulate=low > 0, threads=2)
        check_projection(out, gradients, spec)


@pytest.mark.parametrize("kind", ["rademacher", "normal", "hadamard"])
def test_chunks_that_end_with_a_slice_change_no_bit(kind):
    length = slice_length(spec_of(kind, 1, 8))
    gradients = real_gradients(3, 2 * length + 100)
    spec = spec_of(kind, gradients.shape[1] + 50, 8)
    head = project(gradients[:, : length - 50], spec, offset=50)
    tail = gradients[:, length - 50 :]
    in_two = project(tail, spec, offset=length, out=head, accumulate=True)
    np.testing.assert_array_equal(in_two, project(gradients, spec, offset=50))


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_every_dtype_equal_their_float32_values(kind, dtype):
    gradients = torch.from_numpy(real_gradients(5, 300)).to(dtype)
    spec = spec_of(kind, 300, 33)
    expected = project(gradients.float().numpy(), spec)
    actual = project([gradients[:, :131], gradients[:, 131:]], spec)
    assert isinstance(actual, torch.Tensor)
    assert actual.dtype is torch.float32
    np.testing.assert_array_equal(actual.numpy(), expected)
    if dtype is not torch.bfloat16:
        np.testing.assert_array_equal(project(gradients.numpy(), spec), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_rows(kind):
    wide = integer_gradients(57, 700)
    spec = spec_of(kind, 350, 33)
    for rows in (wide[::3, ::2], wide[::3, 11:361], wide[::-3, 350:], wide[::3, 350:0:-1]):
        expected = project(np.ascontiguousarray(rows), spec)
        np.testing.assert_array_equal(project(rows, spec), expected)
        np.testing.assert_array_equal(project(np.asfortranarray(rows), spec), expected)
        check_projection(expected, rows, spec)


def test_kernels_get_contiguous_rows():
    """Numba would compile a kernel for another layout, which takes seconds."""
    wide = integer_gradients(9, 90)
    for rows in (wide, wide[:, 11:81], wide[::-1, 20:], wide[:, ::2]):
        matrix, start, stop = _slice_rows([rows], 3, 40)
        assert matrix.flags.c_contiguous
        np.testing.assert_array_equal(matrix[:, start:stop], rows[:, 3:40])
        assert np.shares_memory(matrix, wide) is (rows is wide)


@pytest.mark.gate
@pytest.mark.parametrize("kind", KINDS)
def test_sums_keep_six_digits_over_a_million_coordinates(kind):
    gradients = real_gradients(2, 2**20)
    spec = spec_of(kind, 2**20, 16)
    expected = sum(
        gradients[:, i : i + 2**16].astype(np.float64) @ projection_matrix(spec, i, 2**16)
        for i in range(0, 2**20, 2**16)
    )
    error = np.abs(project(gradients, spec, threads=2) - expected).max()
    assert error < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
def test_scaled_projection_keeps_squared_norms(kind):
    spec = spec_of(kind, 64, 32)
    gradients = real_gradients(1, 64)
    unscaled = project(gradients, spec)
    is_unit = kind in {"identity", "tensor_sketch"}
    expected = unscaled if is_unit else unscaled / np.float32(np.sqrt(32))
    np.testing.assert_allclose(project(gradients, spec, scale=True), expected, rtol=1e-6)


@pytest.mark.gate
def test_memory_does_not_grow_with_the_gradient():
    """In a process of its own: 8 samples of 2^21 coordinates to 4,096 columns, in blocks.

    A copy of the gradients would take 64 MiB, the results of all slices together 16 MiB.
    """
    program = """
import resource, numpy as np
from trak_core.projection import project
from trak_core.settings import ProjectionSpec
spec = ProjectionSpec(kind="rademacher", n_params=2**21, proj_dim=4096, seed=0, stream=0)
rows = np.zeros((8, 2**21), np.float32)
out = np.zeros((8, 4096), np.float32)
project(rows[:, :50], spec, out=out)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
project([rows[:, : 2**20 + 1], rows[:, 2**20 + 1 :]], spec, out=out, threads=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_python(program).stdout) < 12 * 2**10


@pytest.mark.gate
def test_compiled_code_is_found_by_the_next_process_and_not_after_a_change(tmp_path):
    """A change in a module that a kernel takes a function from counts as well."""
    program = """
import numpy as np
from trak_core.projection.cpu.sketches import hadamard_slice_cpu as kernel
key = np.uint32(0), np.uint32(0), np.uint32(0)
kernel(np.ones((1, 5), np.float32), 0, 5, 0, key, np.ones((1, 8), np.float32))
print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""
    package = tmp_path / "trak_core"
    shutil.copytree(Path(trak_core.__file__).parent, package, ignore=lambda *_: ["__pycache__"])
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def hits_and_misses():
        run = run_python(program, cwd=tmp_path, env=environment)
        return [int(number) for number in run.stdout.split()]

    assert hits_and_misses() == [0, 1]
    assert hits_and_misses() == [1, 0]
    with (package / "projection/cpu/simd_lanes.py").open("a") as file:
        file.write("_ANOTHER = 1\n")
    assert hits_and_misses() == [0, 1]


@pytest.mark.parametrize("kind", ProjectionKind)
def test_back_projection_is_by_the_transpose(kind, monkeypatch):
    """Directions of vectors among the parameters are R's own rows times them."""
    # Some rows of a matrix at a time.
    monkeypatch.setattr(import_module("trak_core.projection.project"), "_ENTRIES", 20)
    shapes = [(5, 7), (1, 3), (40, 2), (3, 33)]
    sizes = [rows * columns for rows, columns in shapes]
    spec = spec_with(shapes, sum(sizes) if kind is ProjectionKind.IDENTITY else 16, kind)
    vectors = np.random.default_rng(0).integers(-4, 5, (3, spec.proj_dim)).astype(np.float32)
    matrix = projection_matrix(spec)
    for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True):
        actual = back_project(torch.from_numpy(vectors), spec, end - size, size)
        expected = vectors.astype(np.float64) @ matrix[end - size : end].T
        # Sums of small integers are exact, except for numbers of the kind normal.
        bound = 1e-6 * np.abs(expected).max() if kind is ProjectionKind.NORMAL else 0
        assert np.abs(actual.numpy() - expected).max() <= bound
